"""LayerNorm Scaling: Pre-LN whose branch inputs shrink with depth.

    h <- h + F(norm(h) / sqrt(l))        l = block number from 1, the same for attention and MLP

Source: Sun et al. 2025 (arXiv 2502.05795); DepthBench `default_scaled`. State: live h [S, B, D]. The final norm is not
scaled. Its published learning rate is 1e-2, five times Pre-LN's.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .hidden import HiddenResidual
from .olmo import OlmoFormat
from .pre_ln import PreLNConnection
from .protocol import Connection, Read, Upcycling
from .state import DepthState


@dataclass(frozen=True)
class LNSConfig:
    norm_eps: float = 1e-6


class LNSConnection(PreLNConnection):
    def __init__(self, block: int, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(width, eps, dtype)
        self.scale = 1 / math.sqrt(block + 1)

    def read(self, state: DepthState) -> Read:
        return Read(self.norm(state.live["h"]) * self.scale)


class LNS(HiddenResidual, name="lns"):
    Config = LNSConfig
    config: LNSConfig
    olmo = OlmoFormat(("default_scaled",))

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return LNSConnection(sublayer // 2, self.shape.hidden_size, self.config.norm_eps, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        return Upcycling(replace(self.config, norm_eps=norm_eps))

    def carried(self, sublayer: int, norm_D: Tensor) -> dict[str, Tensor]:
        """The norms' weights undo the scale."""
        scaled = sublayer < self.shape.num_sublayers
        return {"norm.weight": norm_D * math.sqrt(sublayer // 2 + 1) if scaled else norm_D}
