"""Rotary position embedding, rotate-half layout.

Shapes: S sequence, B microbatch, H heads, K head dim.
"""

import torch
from torch import Tensor

from .config import ModelConfig
from .rope_scaling import inverse_frequencies


class Rope:
    """Cosines and sines [S, 1, 1, K/2] for the positions of one call, made once and kept per device and dtype."""

    def __init__(self, config: ModelConfig) -> None:
        self.frequencies, self.factor = inverse_frequencies(config.head_size, config.rope_theta, config.rope_scaling)
        self._cache: dict[tuple[int, int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, device: torch.device, dtype: torch.dtype, start: int = 0) -> tuple[Tensor, Tensor]:
        key = (start, length, device, torch.promote_types(dtype, torch.float32))
        if key not in self._cache:
            positions = torch.arange(start, start + length, dtype=torch.float64)
            angles = torch.outer(positions, self.frequencies)[:, None, None, :]
            cos, sin = (f(angles).mul(self.factor).to(device=device, dtype=key[3]) for f in (torch.cos, torch.sin))
            self._cache = {key: (cos, sin)}  # one call at a time: all its layers have the same positions
        return self._cache[key]

    def rotate(self, x_SBHK: Tensor, start: int = 0) -> Tensor:
        """Rotate queries or keys at positions from `start`; computed in float32 or better, returned in x's dtype."""
        cos, sin = self.tables(x_SBHK.shape[0], x_SBHK.device, x_SBHK.dtype, start)
        a, b = x_SBHK.to(cos.dtype).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_SBHK.dtype)
