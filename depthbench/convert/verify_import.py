"""Whether an import computes what its source does: both run on the same tokens, one after the other.

The source's own implementation runs where it has one (a Hugging Face folder: transformers' Llama or, of our exports,
this package's Hugging Face model, never the folder's code); else the trainer's model, with the source's weights. The
import is run by the trainer's model, on one process. Both compute in float32 (an import in float64: in float64), with
weights as the import stores them. Unlike verification of an export, logits alone are compared, and a model that
transformers runs is in memory as a whole.

Shapes: S tokens, B sequences, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .importing import Import
from .reading import Weights
from .source import Source
from .trainers_model import run_trainers_model
from .upcycle import Upcycled
from .verify import TOLERANCE, TOLERANCE_FLOAT64, relative_error, sample_tokens

Types = Mapping[str, torch.dtype]


@runtime_checkable
class Runs(Protocol):
    """A source that computes by itself. float32_norms: whether its norms are in float32 whatever `dtype` is."""

    float32_norms: bool

    def logits(self, tokens_BS: Tensor, stored: Types, dtype: torch.dtype) -> Tensor:
        """[B, S, V], computed in `dtype` from weights rounded to the types `stored`, by logical name."""


@dataclass(frozen=True)
class Difference:
    """logits: largest difference, over the source's largest element. different: why there may be one."""

    tokens: int
    logits: float
    tolerance: float
    different: str

    @property
    def as_said(self) -> bool:
        """Whether it is no larger than it was said to be."""
        return bool(self.different) or self.logits <= self.tolerance  # NaN is not

    def describe(self) -> str:
        if self.different:
            return (
                f"another function, as said: logits at {self.tokens} positions differ by {self.logits:.1e} of the "
                f"largest ({self.different})"
            )
        if self.as_said:
            return f"verified: logits at {self.tokens} positions agree to {self.logits:.1e} of the largest"
        return f"the import does not compute what its source does: logits differ by {self.logits:.1e} of the largest"


def verify(source: Source, done: Import) -> Difference:
    """Run both models. Nothing is changed or removed, whatever comes out.

    source: what was imported; of one that became another architecture, the model that it was is run.
    """
    tokens_BS = sample_tokens(done.run)
    dtype = torch.float64 if done.dtype is torch.float64 else torch.float32
    stored = {tensor.logical: tensor.dtype for tensor in done.tensors}
    original, different = (source.source, source.different) if isinstance(source, Upcycled) else (source, "")
    exact = dtype is torch.float64 and not (isinstance(original, Runs) and original.float32_norms)
    tolerance = TOLERANCE_FLOAT64 if exact else TOLERANCE
    if isinstance(source, Upcycled) and source.rounds(stored):
        tolerance += 8 * torch.finfo(done.dtype).eps
    if isinstance(original, Runs):
        theirs = original.logits(tokens_BS, stored, dtype)
    else:
        run = replace(done.run, architecture=original.architecture, residual=original.residual)

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            return original.read(name).to(stored.get(name, done.dtype)).reshape(shape)

        theirs = run_trainers_model(run, read, tokens_BS, dtype).logits
    weights = Weights(done.folder)
    ours = run_trainers_model(done.run, lambda n, s: weights.read(n, s, weights.dtypes[n]), tokens_BS, dtype).logits
    return Difference(tokens_BS.numel(), relative_error(ours, theirs), tolerance, different)
