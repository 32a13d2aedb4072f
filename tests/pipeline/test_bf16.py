"""bfloat16 in a pipeline: master weights stay the model's."""

from typing import Any

import pytest
import torch

from depthbench.checkpoint.tensors import _owned
from depthbench.config.schema import RunConfig
from depthbench.training.optimizer import Optimizer
from tests.harness import run_workers
from tests.models import small_run, start_model
from tests.parallel.test_layouts import train_all

INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2, "distributed_optimizer": True}


def stray_weights(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[list[float], list[str]]:
    """Losses of all steps, and the parameters that are not their master weights, rounded."""
    model = start_model(rank, world_size, store, run)
    optimizer = Optimizer(run, model)
    losses, _ = train_all(run, model, optimizer)
    stray = []
    for stage in model.stages:
        for name, parameter, own in _owned(optimizer.inner, stage):
            held = parameter.detach().view(-1)[own.start : own.start + own.main.numel()]
            if not torch.equal(held, own.main.detach().view(-1).to(held.dtype)):
                stray.append(name)
    return losses, stray


@pytest.mark.parametrize(
    ("architecture", "residual"),
    [("pre_ln", {}), ("block_attnres", {"sublayers_per_block": 3}), ("mhc", {}), ("moda", {})],
)
def test_weights_stay_their_masters(architecture: str, residual: dict[str, Any]) -> None:
    """Also where float32 parameters stand beside bfloat16 ones, in every chunk; losses are those of one process."""
    train = {"precision": "bf16", "steps": 3, "global_batch": 16, "micro_batch": 2}
    alone = small_run(architecture, residual, train=train)
    ((expected, stray),) = run_workers(1, stray_weights, alone)
    assert not stray
    for parallel, world_size in ((INTERLEAVED, 2), ({**INTERLEAVED, "overlap_grad_reduce": True}, 4)):
        run = small_run(architecture, residual, parallel=parallel, train=train)
        for losses, stray in run_workers(world_size, stray_weights, run):
            assert not stray
            assert losses == pytest.approx(expected, abs=1e-2)
