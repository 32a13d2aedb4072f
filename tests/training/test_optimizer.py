"""Which parameters weight decay takes hold of: all but the static routing of HC and mHC."""

from typing import Any

import pytest
import torch

from depthbench.config.schema import RunConfig
from depthbench.model.init import generator_for
from depthbench.training.optimizer import Optimizer
from tests.harness import run_workers
from tests.models import Pieces, model_pieces, small_run, start_model
from tests.residual.walk import SHIPPED, shipped

LR, DECAY = 0.25, 0.5
EXEMPT = {
    "hc": {"static_alpha", "static_beta"},
    "mhc": {"bias", "scale_pre", "scale_post", "scale_res"},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "dp2_sharded": (2, {"distributed_optimizer": True, "bucket_size": 5000}),
}


def decayed(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[Pieces, Pieces]:
    """Random weights of this rank, and what an update makes of them whose gradients are all zero."""
    model = start_model(rank, world_size, store, run)
    with torch.no_grad():
        for stage in model.stages:
            for name, parameter in stage.named_parameters():
                parameter.copy_(1 + torch.rand(parameter.shape, generator=generator_for(0, name)))
    before = model_pieces(model, "data")
    optimizer = Optimizer(run, model)
    optimizer.zero_grad()
    optimizer.apply(LR, optimizer.prepare())
    optimizer.weights_are_current()
    return before, model_pieces(model, "data")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHIPPED)
def test_weight_decay(name: str, layout: str) -> None:
    architecture, settings = shipped(name)
    world_size, parallel = LAYOUTS[layout]
    run = small_run(
        architecture,
        settings,
        parallel=parallel,
        train={"precision": "fp32"},
        optimizer={"lr": LR, "weight_decay": DECAY},
    )
    for before, after in run_workers(world_size, decayed, run):
        for tensor, (_, _, weight) in before.items():
            kept = tensor.rpartition(".")[2] in EXEMPT.get(architecture, set())
            expected = weight if kept else weight * (1 - LR * DECAY)
            torch.testing.assert_close(after[tensor][2], expected, rtol=0 if kept else 1e-6, atol=0, msg=tensor)
