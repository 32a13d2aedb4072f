"""Pre-LN: the plain residual connection.

    h <- h + F(norm(h))

Source: Xiong et al. 2020 (arXiv 2002.04745); DepthBench `default`. State: live h [S, B, D].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .hidden import HiddenResidual
from .norms import RMSNorm
from .olmo import OlmoFormat
from .protocol import Connection, Read, Upcycling
from .state import DepthState


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


class PreLN(HiddenResidual, name="pre_ln"):
    Config = PreLNConfig
    config: PreLNConfig
    llama_names = {  # noqa: RUF012
        "attention_residual.norm.weight": "input_layernorm.weight",
        "mlp_residual.norm.weight": "post_attention_layernorm.weight",
        "readout.norm.weight": "norm.weight",
    }
    olmo = OlmoFormat(("default",))

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return PreLNConnection(self.shape.hidden_size, self.config.norm_eps, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        return Upcycling(replace(self.config, norm_eps=norm_eps))
