"""From a run's settings to its model."""

import torch

from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.parallel.context import ParallelContext

from .init import initialize
from .stage import DecoderStage, StageSpan


def build_stage(run: RunConfig, context: ParallelContext, draw: bool = True) -> DecoderStage:
    """This rank's stage, initialised from the run's seed; all zero if not `draw`n, to be filled from a checkpoint."""
    span = StageSpan(0, run.model.num_layers, run.model.num_layers)
    stage = DecoderStage(run.model, residual_of(run), span, context, run.parallel.recompute)
    if draw:
        initialize(stage, run.seed, context)
    else:
        for parameter in stage.parameters():
            torch.nn.init.zeros_(parameter)
    return stage
