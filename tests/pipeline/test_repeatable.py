"""A pipeline's gradients repeat bit by bit, and without the cache they are those of one process bit by bit."""

from typing import Any

import pytest
import torch

from depthbench.config.schema import RunConfig
from depthbench.training.step import run_microbatches
from tests.harness import run_workers
from tests.models import ARCHITECTURES, Weights, assemble, model_pieces, small_run, start_model
from tests.parallel.test_layouts import microbatches

TRAIN = {"precision": "fp32", "global_batch": 8, "micro_batch": 2}
PIPELINES: dict[str, dict[str, Any]] = {"pp2": {"pipeline": 2}, "pp2_vp2": {"pipeline": 2, "virtual_pipeline": 2}}


def gradients(rank: int, world_size: int, store: str, run: RunConfig, direct: bool) -> Any:
    """direct: each read of the depth state passes over its sources alone. A stage's edge cuts a pass that several reads
    share, which then rounds apart."""
    model = start_model(rank, world_size, store, run)
    if direct:
        for stage in model.stages:
            stage.share_reads(1)
    run_microbatches(model, microbatches(run, 0, 0, 1), forward_only=False)
    return model_pieces(model, "main_grad")


def whole(run: RunConfig, direct: bool = False) -> Weights:
    return assemble(run_workers(run.parallel.pipeline, gradients, run, direct))


def assert_equal(one: Weights, other: Weights) -> None:
    assert set(one) == set(other)
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(("architecture", "residual"), [(name, residual) for name, residual, _ in ARCHITECTURES])
def test_without_the_cache_equal_to_one_process(architecture: str, residual: dict[str, Any]) -> None:
    expected = whole(small_run(architecture, residual, train=TRAIN), direct=True)
    for parallel in PIPELINES.values():
        pipeline = {"history_cache": False}
        run = small_run(architecture, residual, parallel=parallel, pipeline=pipeline, train=TRAIN)
        assert_equal(whole(run, direct=True), expected)


@pytest.mark.parametrize(("architecture", "residual"), [("moda", {}), ("block_attnres", {"sublayers_per_block": 1})])
@pytest.mark.parametrize("overlap", [False, True])
def test_with_the_cache_two_runs_are_equal(architecture: str, residual: dict[str, Any], overlap: bool) -> None:
    run = small_run(
        architecture,
        residual,
        parallel=PIPELINES["pp2_vp2"],
        pipeline={"overlap_p2p": overlap},
        train={**TRAIN, "precision": "bf16"},
    )
    assert_equal(whole(run), whole(run))
