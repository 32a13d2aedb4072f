"""The trainer's own model on one process, with a checkpoint's weights as an export stores them.

Shapes: S tokens, B sequences, V vocabulary, D hidden, N residual streams.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from depthbench.config.schema import ParallelConfig, PipelineConfig, Precision
from depthbench.model.build import build_stage
from depthbench.model.stage import Block, DecoderStage
from depthbench.parallel import startup
from depthbench.parallel.placement import logical_shards
from depthbench.residual.state import DepthState

from .export import Export
from .layerwise import Layerwise, parameters_on_meta


@dataclass(frozen=True)
class Values:
    """logits: [B, S, V]. blocks: what each block leaves, [B, S, D] (residual streams: [B, S, N, D]). states: what each
    block, and at last the readout, got: the source's depth states, with tokens first."""

    logits: Tensor
    blocks: list[Tensor]
    states: list[DepthState]


@torch.no_grad()
def source_values(done: Export, tokens_BS: Tensor) -> Values:
    """What the trainer's model computes, in float32, or in float64 for an export in that."""
    precision = Precision.FP64 if done.dtype is torch.float64 else Precision.FP32
    run = replace(
        done.weights.run,
        parallel=ParallelConfig(distributed_optimizer=False),
        pipeline=PipelineConfig(),
        train=replace(done.weights.run.train, precision=precision),
    )
    context = startup.start(run)
    try:
        with parameters_on_meta():
            stage = build_stage(run, context, draw=False)
        table = stage.embedding if run.model.tie_embeddings else stage.head
        blocks = list(cast(Iterable[Block], stage.blocks.values()))
        branches = [branch for block in blocks for branch in (block.attention, block.mlp)]
        weights = Layerwise(stage, {stage.embedding, table, *branches}, _reader(stage, done))
        weights.hook(branches)
        with weights.present(stage.embedding):
            state = stage.residual.start(stage.embed(tokens_BS))
        states, left = [state], []
        for block in blocks:
            state = block(state)
            states.append(state)
            left.append(stage.residual.probe(state).transpose(0, 1))
        with weights.present(table):
            logits = stage.logits(state)[..., : run.model.vocab_size].transpose(0, 1)
        return Values(logits, left, states)
    finally:
        startup.stop()


def _reader(stage: DecoderStage, done: Export) -> Callable[[str], Tensor]:
    """Values of the stage's parameters by their names, from the logical tensors that they store."""
    exported = {tensor.logical: tensor for tensor in done.tensors}
    parameters = {name: (p, list(logical_shards(name, p, 0, 1))) for name, p in stage.named_parameters()}

    def read(name: str) -> Tensor:
        parameter, shards = parameters[name]
        values = torch.zeros(parameter.shape, dtype=parameter.dtype)  # rows that pad the vocabulary
        for shard in shards:
            tensor = exported[shard.name]
            values[shard.local] = done.weights.read(tensor.logical, tensor.shape, tensor.dtype)[shard.glob]
        return values

    return read
