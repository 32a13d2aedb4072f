"""Every tensor-parallel rank's copy of a replicated parameter stays the same, bit by bit, as training goes on."""

from typing import Any

import pytest
import torch

from depthbench.config.schema import RunConfig
from depthbench.training.optimizer import Optimizer
from tests.harness import run_workers
from tests.models import Pieces, assemble, model_pieces, pieces, start_model
from tests.parallel.test_layouts import train_all
from tests.residual.walk import SHIPPED, shipped_run

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2, "distributed_optimizer": False}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True, "distributed_optimizer": True}),
    "tp2_sp_dp2": (4, {"tensor": 2, "sequence": True, "distributed_optimizer": True}),
}
CASES = [
    *((name, layout) for layout in ("tp2", "tp2_sp") for name in SHIPPED),
    ("full_attnres", "tp2_sp_dp2"),
    ("mhc", "tp2_sp_dp2"),
]


def weights_and_masters(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[Pieces, Pieces]:
    """After all updates; no masters where data-parallel ranks share them out."""
    model = start_model(rank, world_size, store, run)
    train_all(run, model, Optimizer(run, model))
    weights = model_pieces(model, "data")
    if run.parallel.distributed_optimizer and model.context.dp_size > 1:
        return weights, {}
    (stage,) = model.stages
    for parameter in stage.parameters():
        master = getattr(parameter, "main_param", parameter)  # float32 ones are their own
        parameter.master = master.view_as(parameter)  # type: ignore[attr-defined]
    return weights, pieces(stage, "master")


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_copies_stay_equal(name: str, layout: str) -> None:
    """Twenty bfloat16 updates: the ranks' copies of weights and float32 masters (`assemble` compares them)."""
    world_size, parallel = LAYOUTS[layout]
    train = {"precision": "bf16", "steps": 20, "micro_batch": 2, "global_batch": world_size}
    run = shipped_run(name, parallel=parallel, train=train, optimizer={"lr": 5e-3})
    ranks = run_workers(world_size, weights_and_masters, run)
    weights, masters = (assemble(list(found)) for found in zip(*ranks, strict=True))
    assert {weight.dtype for weight in weights.values()} <= {torch.bfloat16, torch.float32}
    assert {master.dtype for master in masters.values()} <= {torch.float32}
    assert all(torch.equal(master.to(weights[key].dtype), weights[key]) for key, master in masters.items())
