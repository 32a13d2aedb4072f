"""The model and the optimizer as logical tensors, in pieces that Megatron-Core's `dist_checkpointing` can store.

A checkpoint knows logical tensors only (`model.blocks.0.attention.q.weight`), whose names and shapes no layout changes.
A rank offers what it holds of them as rectangles. For weights these are its tensor-parallel slices. The distributed
optimizer cuts each bucket's flat buffer into equal ranges, one a data-parallel rank, so a rank's moments of a matrix
are a run of its row-major elements: at most three rectangles (the end of a row, whole rows, the start of a row).

Megatron-Core's own formats either gather all moments on one rank (19 GB for 1.6B) or tie the checkpoint to the layout,
and its reshardable one corrupts moments when a bucket other than the last is padded (fixed upstream by PR 5077, after
0.16.1). Here each rank writes its own rectangles, nothing is gathered, buckets and their padding never enter, and every
checkpoint can be loaded under every layout.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

from depthbench.model.stage import DecoderStage
from depthbench.parallel.placement import LogicalShard, logical_shards, spec_of
from depthbench.training.optimizer import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


class Rectangle(NamedTuple):
    """A box of a stored parameter and the range of flat elements, counted from the run's start, that fill it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    begin: int
    end: int


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Rectangle]:
    """Cut elements [start, stop) of a row-major tensor (at most two-dimensional) into boxes, in order."""
    if len(shape) < 2:
        yield Rectangle((start,) * len(shape), (stop - start,) * len(shape), 0, stop - start)
        return
    width = shape[1]
    at = start
    while at < stop:
        row, column = divmod(at, width)
        if column or stop - at < width:
            rows, columns = 1, min(width - column, stop - at)
        else:
            rows, columns = (stop - at) // width, width
        yield Rectangle((row, column), (rows, columns), at - start, at - start + rows * columns)
        at += rows * columns


def _sharded(key: str, data: Tensor, shard: LogicalShard, offset: tuple[int, ...], replica: int) -> ShardedTensor:
    """One box of a logical tensor. A scalar is stored as one element."""
    shape = shard.part.shape
    if not shape:
        data, shape, offset = data.view(1), (1,), (0,)
    return ShardedTensor(
        key=f"{key}.{shard.name}",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=tuple(shape),
        global_offset=offset,
        axis_fragmentations=None,  # boxes of any size: torch's planner checks that they tile the tensor
        replica_id=replica,
    )


def _boxes(
    key: str, name: str, parameter: nn.Parameter, flat: Tensor, start: int, stage: DecoderStage, dp_replica: int
) -> Iterator[ShardedTensor]:
    """Elements [start, start + len(flat)) of a stored parameter (or of its moments) as boxes of its logical tensors."""
    context = stage.context
    # every tensor-parallel rank holds all of a parameter that is not divided; the first one writes it
    replica = dp_replica + (context.tp_rank * context.dp_size if spec_of(name, parameter).shard_axis is None else 0)
    if stage.tied_copy and parameter is stage.shared_embedding_or_output_weight():
        replica += context.tp_size * context.dp_size  # the stage with the embedding writes it
    shape = tuple(parameter.shape)
    width = parameter.numel() // shape[0] if shape else 1
    for shard in logical_shards(name, parameter, context.tp_rank, context.tp_size):
        # a logical tensor is a run of whole rows of the stored parameter
        first_row, last_row = (shard.local[0].start, shard.local[0].stop) if shape else (0, 1)
        begin, end = max(start, first_row * width), min(start + flat.numel(), last_row * width)
        if begin >= end:
            continue
        run = flat[begin - start : end - start]
        for box in rectangles(shape, begin, end):
            local = tuple(s.start for s in shard.local)
            offset = tuple(o - s + g.start for o, s, g in zip(box.offset, local, shard.glob, strict=True))
            yield _sharded(key, run[box.begin : box.end].view(box.shape), shard, offset, replica)


def model_tensors(stages: Sequence[DecoderStage]) -> list[ShardedTensor]:
    """The stages' weights, as views: loading into them fills the model."""
    return [
        box
        for stage in stages
        for name, parameter in stage.named_parameters()
        for box in _boxes("model", name, parameter, parameter.detach().view(-1), 0, stage, stage.context.dp_rank)
    ]


class _Owned(NamedTuple):
    """What this rank's optimizer keeps of a parameter: main weights (maybe the parameter itself), from element `start`
    on."""

    main: nn.Parameter
    start: int
    replica: int


def _main_weights(inner: Any) -> dict[nn.Parameter, nn.Parameter]:
    """What the optimizer updates in place of each of the model's parameters, where that is another tensor.

    From the groups themselves: Megatron's `model_param_group_index_map` counts wrongly where a group mixes float32 and
    bfloat16 parameters, since the optimizer keeps the float32 ones first.
    """
    if isinstance(inner, DistributedOptimizer):
        pairs = [
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
            (inner.model_fp32_groups, inner.shard_fp32_groups),
        ]
    elif isinstance(inner, Float16OptimizerWithFloat16Params):
        pairs = [(inner.float16_groups, inner.fp32_from_float16_groups)]
    else:
        pairs = []
    return {
        model: main
        for models, mains in pairs
        for model_group, main_group in zip(models, mains, strict=True)
        for model, main in zip(model_group, main_group, strict=True)
    }


def _owned(inner: Any, stage: DecoderStage) -> Iterator[tuple[str, nn.Parameter, _Owned]]:
    mains = _main_weights(inner)
    for name, parameter in stage.named_parameters():
        if not isinstance(inner, DistributedOptimizer):
            yield name, parameter, _Owned(mains.get(parameter, parameter), 0, stage.context.dp_rank)
        elif parameter in mains:
            # each element belongs to one data-parallel rank alone
            span = inner._get_model_param_range_map(parameter)["param"]
            assert mains[parameter].numel() == span.size, f"{name}: {mains[parameter].numel()} != {span.size} elements"
            yield name, parameter, _Owned(mains[parameter], span.start, 0)


def ensure_moments(optimizer: Optimizer) -> None:
    """Give every main weight the state that its first update would, so that there is somewhere to load to."""
    adam = optimizer.torch_optimizer
    for group in adam.param_groups:
        for main in group["params"]:
            state = adam.state[main]
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(main)
            if isinstance(adam, torch.optim.AdamW) and "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)


def optimizer_tensors(optimizer: Optimizer) -> list[ShardedTensor]:
    """Moments and, where weights have float32 masters, those: as views of the optimizer's own tensors."""
    ensure_moments(optimizer)
    adam = optimizer.torch_optimizer
    found: list[ShardedTensor] = []
    owned = ((stage, *each) for stage in optimizer.model.stages for each in _owned(optimizer.inner, stage))
    for stage, name, parameter, own in owned:
        kept = {moment: adam.state[own.main][moment] for moment in MOMENTS}
        if own.main.dtype != parameter.dtype:
            kept["master"] = own.main
        for kind, tensor in kept.items():
            flat = tensor.detach().view(-1)
            found += _boxes(f"optimizer.{kind}", name, parameter, flat, own.start, stage, own.replica)
    return found


def master_weights(optimizer: Optimizer) -> list[ShardedTensor]:
    """Those masters that are not the model's own tensors, under the weights' names: loading a checkpoint's weights into
    them loses no digit to the model's type."""
    return [
        box
        for stage in optimizer.model.stages
        for name, parameter, own in _owned(optimizer.inner, stage)
        if own.main.dtype != parameter.dtype
        for box in _boxes("model", name, parameter, own.main.detach().view(-1), own.start, stage, own.replica)
    ]


def updates_done(optimizer: Optimizer) -> int:
    """How many updates the optimizer has made (Adam's bias correction depends on it)."""
    adam = optimizer.torch_optimizer
    group = adam.param_groups[0]
    if "step" in group:  # Transformer Engine's and Apex's Adam count per group
        return int(group["step"])
    return max((int(state["step"]) for state in adam.state.values() if "step" in state), default=0)


def set_updates_done(optimizer: Optimizer, count: int) -> None:
    adam = optimizer.torch_optimizer
    for group in adam.param_groups:
        if not isinstance(adam, torch.optim.AdamW):
            group["step"] = count
            continue
        for main in group["params"]:
            adam.state[main]["step"] = torch.tensor(float(count))


def random_state(rank: int, world_size: int) -> list[ShardedTensor]:
    """Each rank's CPU random state (nothing draws from it while training; whatever is added may)."""
    state = torch.get_rng_state()
    return [ShardedTensor.from_rank_offsets("random.cpu", state.unsqueeze(0), (0, rank, world_size))]
