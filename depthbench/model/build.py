"""From a run's settings to its model."""

from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.parallel.context import ParallelContext

from .init import initialize
from .stage import DecoderStage, StageSpan


def build_stage(run: RunConfig, context: ParallelContext) -> DecoderStage:
    """This rank's stage, initialised from the run's seed."""
    span = StageSpan(0, run.model.num_layers, run.model.num_layers)
    stage = DecoderStage(run.model, residual_of(run), span, context, run.parallel.recompute)
    initialize(stage, run.seed, context)
    return stage
