"""The norms. Token-wise, so they run unchanged on sequence-sharded activations; statistics in float32 or better, output
in x's dtype."""

import torch.nn.functional as F
from torch import Tensor, dtype, nn

from .parameters import constant, residual_parameter


class Norm(nn.Module):
    """eps, and a gain of each channel."""

    def __init__(self, width: int, eps: float, dtype: dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = residual_parameter((width,), constant(1.0), dtype=dtype)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class LayerNorm(Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight over the last axis; no bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, None, self.eps)
