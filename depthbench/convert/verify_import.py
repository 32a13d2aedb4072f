"""Whether an import computes what its source does: both run on the same tokens, one after the other.

The source's own implementation runs where it has one (a Hugging Face folder: transformers' Llama or, of our exports,
this package's Hugging Face model, never the folder's code); else the trainer's model, with the source's weights. The
import is run by the trainer's model, on one process. Both compute in float32 (an import in float64: in float64), with
weights as the import stores them. Unlike verification of an export, a whole model is in memory, and logits alone are
compared.

Shapes: S tokens, B sequences, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from depthbench.config.schema import ParallelConfig, PipelineConfig, Precision, RunConfig
from depthbench.model.build import build_stage
from depthbench.parallel import startup
from depthbench.parallel.placement import logical_shards

from .importing import Import
from .reading import Weights
from .source import Source
from .verify import TOLERANCE, sample_tokens

Types = Mapping[str, torch.dtype]


@runtime_checkable
class Runs(Protocol):
    """A source that computes by itself."""

    def logits(self, tokens_BS: Tensor, stored: Types, dtype: torch.dtype) -> Tensor:
        """[B, S, V], computed in `dtype` from weights rounded to the types `stored`, by logical name."""


@dataclass(frozen=True)
class Difference:
    """logits: largest difference, over the source's largest element. different: why there may be one. rounding: of the
    weights that upcycling has scaled."""

    tokens: int
    logits: float
    different: str
    rounding: float

    @property
    def as_said(self) -> bool:
        """Whether it is no larger than it was said to be."""
        return bool(self.different) or self.logits <= TOLERANCE + self.rounding  # NaN is not

    def describe(self) -> str:
        if self.different:
            return (
                f"another function, as said: logits at {self.tokens} positions differ by {self.logits:.1e} of the "
                f"largest ({self.different})"
            )
        if self.as_said:
            return f"verified: logits at {self.tokens} positions agree to {self.logits:.1e} of the largest"
        return f"the import does not compute what its source does: logits differ by {self.logits:.1e} of the largest"


def verify(source: Source, done: Import, different: str = "") -> Difference:
    """Run both models. Nothing is changed or removed, whatever comes out.

    source: as it was before it became another architecture. different: why the import may compute something else.
    """
    tokens_BS = sample_tokens(done.run)
    dtype = torch.float64 if done.dtype is torch.float64 else torch.float32
    stored = {tensor.logical: tensor.dtype for tensor in done.tensors}
    if isinstance(source, Runs):
        theirs = source.logits(tokens_BS, stored, dtype)
    else:
        run = replace(done.run, architecture=source.architecture, residual=source.residual)

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            return source.read(name).to(stored.get(name, done.dtype)).reshape(shape)

        theirs = trainers_logits(run, read, tokens_BS, dtype)
    weights = Weights(done.folder)
    ours = trainers_logits(done.run, lambda n, shape: weights.read(n, shape, weights.dtypes[n]), tokens_BS, dtype)
    scaled = done.run.architecture != source.architecture and done.dtype is torch.bfloat16
    rounding = 8 * torch.finfo(torch.bfloat16).eps if scaled else 0.0
    return Difference(tokens_BS.numel(), float((ours - theirs).abs().max() / theirs.abs().max()), different, rounding)


@torch.no_grad()
def trainers_logits(
    run: RunConfig, read: Callable[[str, tuple[int, ...]], Tensor], tokens_BS: Tensor, dtype: torch.dtype
) -> Tensor:
    """[B, S, V] of the trainer's model on this process. read: gives a logical tensor by name and shape."""
    precision = Precision.FP64 if dtype is torch.float64 else Precision.FP32
    run = replace(
        run,
        parallel=ParallelConfig(distributed_optimizer=False),
        pipeline=PipelineConfig(),
        train=replace(run.train, precision=precision),
    )
    context = startup.start(run)
    try:
        stage = build_stage(run, context, draw=False)
        for name, parameter in stage.named_parameters():
            for shard in logical_shards(name, parameter, 0, 1):
                parameter[shard.local] = read(shard.name, shard.part.shape)[shard.glob].to(parameter)
        state = stage.residual.start(stage.embed(tokens_BS))
        for block in stage.blocks.values():
            state = block(state)
        return stage.logits(state)[..., : run.model.vocab_size].transpose(0, 1)
    finally:
        startup.stop()
