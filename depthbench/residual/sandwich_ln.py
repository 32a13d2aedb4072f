"""Sandwich-LN (Peri-LN): a norm before the branch and one after it.

    h <- h + post_norm(F(norm(h)))

Source: Ding et al. 2021 (CogView, arXiv 2105.13290), Kim et al. 2025 (Peri-LN, arXiv 2502.02732) without its norm of
the embedding; DepthBench `peri_norm`. State: live h [S, B, D].
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .hidden import HiddenResidual
from .norms import RMSNorm
from .olmo import POST_NORMS, OlmoFormat
from .pre_ln import PreLNConnection
from .protocol import Connection, Kept, Read, Upcycling
from .state import DepthState


@dataclass(frozen=True)
class SandwichLNConfig:
    norm_eps: float = 1e-6
    post_norm_eps: float = 1e-6  # of the norm after the branch


class SandwichLNConnection(PreLNConnection):
    def __init__(self, width: int, cfg: SandwichLNConfig, dtype: torch.dtype) -> None:
        super().__init__(width, cfg.norm_eps, dtype)
        self.post_norm = RMSNorm(width, cfg.post_norm_eps, dtype)

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        return DepthState({"h": state.live["h"] + self.post_norm(y)}, {})


class SandwichLN(HiddenResidual, name="sandwich_ln"):
    Config = SandwichLNConfig
    config: SandwichLNConfig
    olmo = OlmoFormat(("peri_norm",), names=POST_NORMS, eps=("norm_eps", "post_norm_eps"))

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return SandwichLNConnection(self.shape.hidden_size, self.config, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        return Upcycling(
            replace(self.config, norm_eps=norm_eps),
            "every branch's output is normalised, token by token, which no weights of a plain residual undo",
        )

    def kept(self, sublayer: int) -> Kept:
        return Kept(norms=2 if sublayer < self.shape.num_sublayers else 1)

    def num_parameters(self) -> int:
        return (2 * self.shape.num_sublayers + 1) * self.shape.hidden_size
