"""Megatron-Core's parallel linears, bias-free, with their weights declared and left for `model.init` to fill."""

from collections.abc import Sequence
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from torch import Tensor, nn

from depthbench.parallel.context import ParallelContext
from depthbench.residual.parameters import ParameterSpec, Part, declare


def _not_used(weight: object) -> None:
    """Megatron-Core wants an init method; `perform_initialization` is off, so it is never called."""


def column_linear(
    parts: Sequence[Part], context: ParallelContext, rows: int | None = None, own_weight: bool = True
) -> ColumnParallelLinear:
    """x [S, B, D] -> [S, B, rows / TP]: `parts`, each [rows, D], stacked, each divided over ranks by rows.

    Gathers a sequence-sharded x; the forward returns (output, None). rows: with a single part, its padded size.
    own_weight: False for a head that is handed the embedding's weight at each call.
    """
    linear = ColumnParallelLinear(
        parts[0].shape[1],
        rows or sum(part.shape[0] for part in parts),
        config=context.megatron,
        init_method=_not_used,
        bias=False,
        skip_weight_param_allocation=not own_weight,
        tp_group=context.tp_group,
    )
    if own_weight:
        declare(linear.weight, ParameterSpec(tuple(parts), shard_axis=0, local_tokens=False, decay=True))
    return linear


class _RowLinear(RowParallelLinear):
    """Megatron-Core sums over ranks in place, in the matmul's own output. Selective recomputation has kept that very
    tensor and would sum it again, so the sum gets a copy."""

    def _forward_impl(self, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = super()._forward_impl(*args, **kwargs)
        in_place = self.tp_group.size() > 1 and not self.sequence_parallel
        return output.clone() if in_place else output


def row_linear(part: Part, context: ParallelContext) -> RowParallelLinear:
    """x [S, B, inner / TP] -> [S, B, D], summed over ranks (and scattered along S under sequence parallelism)."""
    width, inner = part.shape
    linear = _RowLinear(
        inner,
        width,
        config=context.megatron,
        init_method=_not_used,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=context.tp_group,
    )
    declare(linear.weight, ParameterSpec((part,), shard_axis=1, local_tokens=False, decay=True))
    return linear


def vocab_embedding(part: Part, padded_rows: int, context: ParallelContext) -> VocabParallelEmbedding:
    """tokens [B, S] -> [S, B, D] under sequence parallelism (sharded along S), else [B, S, D]."""
    embedding = VocabParallelEmbedding(
        padded_rows,
        part.shape[1],
        init_method=_not_used,
        reduce_scatter_embeddings=context.sequence_parallel,
        config=context.megatron,
        tp_group=context.tp_group,
    )
    declare(embedding.weight, ParameterSpec((part,), shard_axis=0, local_tokens=False, decay=True))
    return embedding


def shard_tokens(model: nn.Module, on: bool) -> None:
    """Let the parallel layers of `model` share tokens outside their matmuls, or not: a few tokens are not worth it, and
    one cannot be shared. They read the config when they are built, and this afterwards."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.sequence_parallel = on
        elif isinstance(module, VocabParallelEmbedding):
            module.reduce_scatter_embeddings = on
