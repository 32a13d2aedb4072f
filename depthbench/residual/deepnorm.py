"""DeepNorm: post-norm with an enlarged residual and shrunken initial weights.

    h <- LN(alpha h + F(h))        alpha = (2L)^(1/4)

LN is a true LayerNorm (mean subtracted) without bias; there is no pre-norm, and the readout is an RMS norm as
everywhere. v, out, gate, up and down start with deviations multiplied by beta = (8L)^(-1/4).

Source: Wang et al. 2022 (DeepNet, arXiv 2203.00555), decoder-only constants; DepthBench `deepnorm`. State: live h
[S, B, D]. Its published learning rate is 1e-3; 2e-3 diverges.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .hidden import HiddenResidual
from .norms import LayerNorm
from .olmo import OlmoFormat
from .protocol import Connection, Kept, Read, Upcycling
from .state import DepthState


@dataclass(frozen=True)
class DeepNormConfig:
    norm_eps: float = 1e-6


class DeepNormConnection(Connection):
    def __init__(self, alpha: float, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.alpha = alpha
        self.norm = LayerNorm(width, eps, dtype)

    def read(self, state: DepthState) -> Read:
        return Read(state.live["h"])

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        return DepthState({"h": self.norm(self.alpha * state.live["h"] + y)}, {})


class DeepNorm(HiddenResidual, name="deepnorm"):
    Config = DeepNormConfig
    config: DeepNormConfig
    olmo = OlmoFormat(("deepnorm",), norm="default", init="deepnorm")

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        alpha = (2 * self.shape.num_layers) ** 0.25
        return DeepNormConnection(alpha, self.shape.hidden_size, self.config.norm_eps, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        return Upcycling(
            replace(self.config, norm_eps=norm_eps),
            "branches read h without a norm of their own, and h is enlarged and normalised after each; of the norms "
            "only the final one is carried over",
        )

    def carried(self, sublayer: int, norm_D: Tensor) -> dict[str, Tensor]:
        """Its norms lie elsewhere."""
        return {"norm.weight": norm_D} if sublayer == self.shape.num_sublayers else {}

    def kept(self, sublayer: int) -> Kept:
        """A LayerNorm's input, in its own dtype."""
        if sublayer == self.shape.num_sublayers:
            return Kept()
        return Kept(norms=0, tokens=self.shape.hidden_size)

    def init_scale(self, projection: str) -> float:
        return 1.0 if projection in ("q", "k") else (8 * self.shape.num_layers) ** -0.25
