"""The trainer's own model on one process, with weights from wherever they are, one part of them in memory at a time.

Shapes: S tokens, B sequences, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from depthbench.config.schema import ParallelConfig, PipelineConfig, Precision, RunConfig
from depthbench.model.build import build_stage
from depthbench.model.stage import Block, DecoderStage
from depthbench.parallel import startup
from depthbench.parallel.placement import logical_shards
from depthbench.residual.state import DepthState

from .layerwise import Layerwise, parameters_on_meta

Read = Callable[[str, tuple[int, ...]], Tensor]
"""Gives a whole logical tensor by its name and shape."""


@dataclass(frozen=True)
class Values:
    """logits: [B, S, V]. states: what each block, and at last the readout, got: depth states, tokens first."""

    logits: Tensor
    states: list[DepthState]


@torch.no_grad()
def run_trainers_model(run: RunConfig, read: Read, tokens_BS: Tensor, dtype: torch.dtype) -> Values:
    """What it computes in `dtype`, float32 or float64."""
    run = replace(
        run,
        parallel=ParallelConfig(distributed_optimizer=False),
        pipeline=PipelineConfig(),
        train=replace(run.train, precision=Precision.FP64 if dtype is torch.float64 else Precision.FP32),
    )
    context = startup.start(run)
    try:
        with parameters_on_meta():
            stage = build_stage(run, context, draw=False)
        table = stage.embedding if run.model.tie_embeddings else stage.head
        blocks = list(cast(Iterable[Block], stage.blocks.values()))
        branches = [branch for block in blocks for branch in (block.attention, block.mlp)]
        weights = Layerwise(stage, {stage.embedding, table, *branches}, _reader(stage, read))
        weights.hook(branches)
        with weights.present(stage.embedding):
            state = stage.residual.start(stage.embed(tokens_BS))
        states = [state]
        for block in blocks:
            state = block(state)
            states.append(state)
        with weights.present(table):
            logits = stage.logits(state)[..., : run.model.vocab_size].transpose(0, 1)
        return Values(logits, states)
    finally:
        startup.stop()


def _reader(stage: DecoderStage, read: Read) -> Callable[[str], Tensor]:
    """Values of the stage's parameters by their names, from the logical tensors that they store."""
    parameters = {name: (p, list(logical_shards(name, p, 0, 1))) for name, p in stage.named_parameters()}

    def whole(name: str) -> Tensor:
        parameter, shards = parameters[name]
        values = torch.zeros(parameter.shape, dtype=parameter.dtype)  # rows that pad the vocabulary
        for shard in shards:
            values[shard.local] = read(shard.name, shard.part.shape)[shard.glob].to(values)
        return values

    return whole
