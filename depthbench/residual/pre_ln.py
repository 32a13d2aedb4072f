"""Pre-LN: the plain residual connection.

    h <- h + F(norm(h))

Source: Xiong et al. 2020 (arXiv 2002.04745); DepthBench `default`. State: live h [S, B, D].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .hidden import HiddenReadout
from .norms import RMSNorm
from .protocol import Connection, Cost, Read, Residual
from .state import DepthState, StateSpec, TensorSpec


@dataclass(frozen=True)
class PreLNConfig:
    norm_eps: float = 1e-6


class PreLNConnection(Connection):
    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps, dtype)

    def read(self, state: DepthState) -> Read:
        return Read(self.norm(state.live["h"]))

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        return DepthState({"h": state.live["h"] + y}, {})


class PreLN(Residual, name="pre_ln"):
    Config = PreLNConfig
    config: PreLNConfig

    def start(self, embedding: Tensor) -> DepthState:
        return DepthState({"h": embedding}, {})

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return PreLNConnection(self.shape.hidden_size, self.config.norm_eps, dtype)

    def readout(self, dtype: torch.dtype) -> nn.Module:
        return HiddenReadout(self.shape.hidden_size, self.config.norm_eps, dtype)

    def state_at(self, sublayer: int) -> StateSpec:
        return StateSpec((TensorSpec("h", (self.shape.hidden_size,)),), ())

    def num_parameters(self) -> int:
        return (self.shape.num_sublayers + 1) * self.shape.hidden_size

    def flops_per_token(self) -> Cost:
        return Cost(0, 0)

    def probe(self, state: DepthState) -> Tensor:
        return state.live["h"]
