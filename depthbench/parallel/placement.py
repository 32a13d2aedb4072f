"""The one place that acts on what parameters declare (`residual.parameters`).

A stored parameter holds one or several logical tensors, or this rank's slices of them. Init, checkpoints and tests all
work on the logical ones, whose names and shapes do not depend on the layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from depthbench.residual.parameters import ParameterSpec, Part


@dataclass(frozen=True)
class LogicalShard:
    """This rank's piece of one logical tensor.

    local: where it lies in the stored parameter. glob: where it lies in the logical tensor. Both are tuples of slices
    and of one size; a rank that only holds padding has no shard.
    """

    name: str
    part: Part
    local: tuple[slice, ...]
    glob: tuple[slice, ...]


def spec_of(name: str, parameter: nn.Parameter) -> ParameterSpec:
    spec = getattr(parameter, "spec", None)
    assert isinstance(spec, ParameterSpec), f"parameter {name} declares no placement (residual.parameters.declare)"
    return spec


def logical_name(stored: str, part: Part) -> str:
    """`blocks.0.attention.qkv.weight`, part `q` -> `blocks.0.attention.q.weight`."""
    if not part.name:
        return stored
    *path, _, leaf = stored.split(".")
    return ".".join([*path, part.name, leaf])


def logical_shards(stored: str, parameter: nn.Parameter, tp_rank: int, tp_size: int) -> Iterator[LogicalShard]:
    """The logical tensors that a stored parameter (of global name `stored`) holds on this rank."""
    spec = spec_of(stored, parameter)
    row = 0
    for part in spec.parts:
        whole = tuple(slice(0, n) for n in part.shape)
        name = logical_name(stored, part)
        if spec.shard_axis is None:
            yield LogicalShard(name, part, whole, whole)
            continue
        axis = spec.shard_axis
        # a fused parameter divides each part evenly; a single one may be padded, so its own size counts
        size = parameter.shape[axis] if len(spec.parts) == 1 else part.shape[axis] // tp_size
        start = tp_rank * size
        kept = min(size, part.shape[axis] - start)
        if kept > 0:
            local = (*whole[:axis], slice(row, row + kept), *whole[axis + 1 :])
            glob = (*whole[:axis], slice(start, start + kept), *whole[axis + 1 :])
            yield LogicalShard(name, part, local, glob)
        row += size


def apply_declarations(model: nn.Module, tp_size: int) -> None:
    """Translate the declarations into the attributes that Megatron-Core's DDP, optimizer and gradient norm read."""
    for name, parameter in model.named_parameters():
        spec = spec_of(name, parameter)
        sharded = spec.shard_axis is not None
        # Megatron counts a parameter without this attribute on rank 0 only when it forms the gradient norm
        parameter.tensor_model_parallel = sharded  # type: ignore[attr-defined]
        parameter.partition_dim = spec.shard_axis if sharded else -1  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
        # summed over tensor-parallel ranks by finalize_model_grads, which also asks whether sequence parallel is on
        parameter.sequence_parallel = spec.local_tokens  # type: ignore[attr-defined]
        parameter.without_decay = not spec.decay  # type: ignore[attr-defined]
