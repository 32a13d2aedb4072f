"""From a run's settings to this rank's part of its model."""

import torch

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, residual_of
from depthbench.parallel.context import ParallelContext
from depthbench.pipeline.transport import Transport

from .init import initialize
from .stage import DecoderStage, StageSpan


def build_stages(
    run: RunConfig, context: ParallelContext, transport: Transport | None = None, draw: bool = True
) -> list[DecoderStage]:
    """This rank's model chunks, in depth order: one, or one a virtual pipeline stage. Initialised from the run's seed,
    or all zero if not `draw`n, to be filled from a checkpoint. transport: needed where there are several stages."""
    where = layout_of(run)
    residual = residual_of(run)
    stages = []
    for virtual, chunk in enumerate(where.chunks_of(context.pp_group.rank())):
        stage = DecoderStage(
            run.model,
            residual,
            StageSpan(*where.span(chunk), run.model.num_layers),
            context,
            run.parallel.recompute,
            boundary=transport.boundaries[virtual] if transport else None,
            virtual_rank=virtual if where.chunks_per_stage > 1 else None,
        )
        if draw:
            initialize(stage, run.seed, context)
        else:
            for parameter in stage.parameters():
                torch.nn.init.zeros_(parameter)
        stages.append(stage)
    return stages


def build_stage(run: RunConfig, context: ParallelContext, draw: bool = True) -> DecoderStage:
    """The only chunk of a model that is not cut into stages."""
    (stage,) = build_stages(run, context, draw=draw)
    return stage
