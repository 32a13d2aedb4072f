"""KEEL: pre-norm inside, post-norm outside, with a residual enlarged by the depth.

    sublayer 0:   h <- h + F(norm(h))                            plain Pre-LN
    sublayer 1:   h <- post_norm(h + F(norm(h)))
    later:        h <- post_norm(alpha h + F(norm(h)))           alpha = 2L, the number of sublayers

Source: arXiv 2601.19895; DepthBench `keel`. State: live h [S, B, D].
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
class KEELConfig:
    norm_eps: float = 1e-6
    post_norm_eps: float = 1e-6  # of the norm over h and the branch


class KEELConnection(PreLNConnection):
    def __init__(self, alpha: float, width: int, cfg: KEELConfig, dtype: torch.dtype) -> None:
        super().__init__(width, cfg.norm_eps, dtype)
        self.alpha = alpha
        self.post_norm = RMSNorm(width, cfg.post_norm_eps, dtype)

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        return DepthState({"h": self.post_norm(self.alpha * state.live["h"] + y)}, {})


class KEEL(HiddenResidual, name="keel"):
    Config = KEELConfig
    config: KEELConfig
    olmo = OlmoFormat(("keel",), names=POST_NORMS, eps=("norm_eps", "post_norm_eps"))

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        width = self.shape.hidden_size
        if sublayer == 0:
            return PreLNConnection(width, self.config.norm_eps, dtype)
        return KEELConnection(1.0 if sublayer == 1 else self.shape.num_sublayers, width, self.config, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        return Upcycling(
            replace(self.config, norm_eps=norm_eps),
            "h is multiplied by the depth and normalised, token by token, after every branch, which changes its share "
            "of the sum",
        )

    def kept(self, sublayer: int) -> Kept:
        return Kept(norms=2 if 0 < sublayer < self.shape.num_sublayers else 1)

    def num_parameters(self) -> int:
        return 2 * self.shape.num_sublayers * self.shape.hidden_size  # two a sublayer but the first's, and the readout
