"""From a run's settings to its pipeline."""

import torch

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, local_share, microbatch_group, residual_of
from depthbench.parallel.context import ParallelContext

from .transport import Transport, TransportOptions


def make_transport(run: RunConfig, context: ParallelContext) -> Transport | None:
    """None for a model without stages. A collective call of all processes."""
    if run.parallel.pipeline == 1:
        return None
    check = run.pipeline.check_headers
    options = TransportOptions(
        history_cache=run.pipeline.history_cache,
        group=microbatch_group(run),
        timeout=run.pipeline.timeout,
        check_headers=not torch.cuda.is_available() if check is None else check,
    )
    return Transport(residual_of(run), layout_of(run), local_share(run), context.megatron, context.pp_group, options)
