"""This rank's model chunks inside Megatron-Core's DDP."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from depthbench.config.schema import Precision, RunConfig
from depthbench.model.stage import DecoderStage
from depthbench.parallel.context import ParallelContext
from depthbench.parallel.placement import apply_declarations
from depthbench.pipeline.transport import Transport


@dataclass(frozen=True)
class WrappedModel:
    """chunks: in depth order. transport: between stages, None for a model that is not cut into any."""

    chunks: list[DistributedDataParallel]
    transport: Transport | None

    @property
    def stages(self) -> list[DecoderStage]:
        return [chunk.module for chunk in self.chunks]

    @property
    def context(self) -> ParallelContext:
        return self.stages[0].context

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a collective call, in which a pipeline's watchdog is to look after a stage that never comes."""
        return self.transport.watchdog.waiting(what) if self.transport else nullcontext()

    def train(self, mode: bool = True) -> None:
        for chunk in self.chunks:
            chunk.train(mode)


def wrap(run: RunConfig, stages: Sequence[DecoderStage], transport: Transport | None = None) -> WrappedModel:
    """The stages with gradient buffers that are summed over data-parallel ranks."""
    parallel = run.parallel
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.train.precision is Precision.BF16,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.distributed_optimizer,
        bucket_size=parallel.bucket_size,
    )
    chunks = []
    for stage in stages:
        apply_declarations(stage, stage.context.tp_size)
        if stage.share_embeddings_and_output_weights:
            weight = stage.shared_embedding_or_output_weight()
            weight.shared_embedding = True  # type: ignore[attr-defined]  # a bucket of its own, alike on both stages
            weight.shared = stage.tied_copy  # type: ignore[attr-defined]  # counted once in the gradient norm
        # Megatron-LM passes disable_bucketing for all chunks but the first. That puts buckets of all dtypes into one
        # coalesced gather, which with gloo fills weights of a second chunk with others' values (bf16 beside fp32)
        chunks.append(DistributedDataParallel(config=stage.context.megatron, ddp_config=config, module=stage))
    megatron, no_sync = stages[0].context.megatron, [chunk.no_sync for chunk in chunks]
    megatron.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    model = WrappedModel(chunks, transport)
    megatron.finalize_model_grads_func = _watched(model, megatron.finalize_model_grads_func)
    return model


def _watched(model: WrappedModel, finalize: Callable[..., None]) -> Callable[..., None]:
    def watched(*arguments: Any, **named: Any) -> None:
        with model.waiting("other ranks' gradients"):
            finalize(*arguments, **named)

    return watched
