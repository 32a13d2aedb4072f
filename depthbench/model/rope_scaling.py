"""RoPE's angular frequencies, plain and scaled for longer contexts. Torch only: Hugging Face exports carry a copy."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE reaches beyond the context it was trained with.

    linear: positions divided by `factor`. ntk: theta raised by factor^(K / (K - 2)). yarn: arXiv 2309.00071, high
    frequencies kept, low ones interpolated, with its attention temperature. llama3: Llama 3.1's, wavelengths above
    original_sequence_length / low_freq_factor interpolated, those below its / high_freq_factor kept.
    """

    kind: Literal["linear", "ntk", "yarn", "llama3"]
    factor: float
    original_sequence_length: int = 2048
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[Tensor, float]:
    """Angular frequencies [dim / 2] in float64 for heads of `dim`, and the factor that the scaling puts on cos and
    sin."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    if scaling is None:
        return theta**-exponents, 1.0
    if scaling.kind == "linear":
        return theta**-exponents / scaling.factor, 1.0
    if scaling.kind == "ntk":
        return (theta * scaling.factor ** (dim / (dim - 2))) ** -exponents, 1.0

    frequencies = theta**-exponents
    if scaling.kind == "llama3":
        turns = scaling.original_sequence_length * frequencies / (2 * math.pi)  # over the original context
        span = scaling.high_freq_factor - scaling.low_freq_factor
        kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
        return frequencies / scaling.factor * (1 - kept) + frequencies * kept, 1.0

    def dimension_of(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original context."""
        return dim * math.log(scaling.original_sequence_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_of(scaling.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp), 0.1 * math.log(scaling.factor) + 1.0
