"""How long collective operations wait, by the launcher's word and the watchdog of a pipeline."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from depthbench.config.schema import RunConfig
from depthbench.parallel import startup
from tests.harness import defer_world, run_workers
from tests.models import small_run


def limits(rank: int, world_size: int, store: str, run: RunConfig, word: str | None) -> tuple[float, set[float]]:
    """Seconds: the world's, and those of every group of Megatron-Core's that a run uses."""
    defer_world(rank, world_size, store)
    os.environ.pop(startup.TIMEOUT_VARIABLE, None)
    if word:
        os.environ[startup.TIMEOUT_VARIABLE] = word
    context = startup.start(run)
    groups = [context.tp_group, context.dp_group, context.pp_group, parallel_state.get_embedding_group()]
    groups += [parallel_state.get_model_parallel_group(), parallel_state.get_data_parallel_group()]

    def seconds(group: Any) -> float:
        limit: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return limit

    return seconds(dist.group.WORLD), {seconds(group) for group in groups}


@pytest.mark.parametrize(
    ("parallel", "timeout", "word", "world", "others"),
    [
        ({"tensor": 2}, 1800.0, None, 1800, 1800),
        ({"tensor": 2}, 1800.0, "90", 90, 120),  # whole minutes
        ({"pipeline": 2}, 1800.0, None, 3600, 3600),
        ({"pipeline": 2}, 1800.0, "300", 3600, 3600),
        ({"pipeline": 2}, 70.0, "300", 300, 300),
        ({"pipeline": 2}, 70.0, "90", 140, 180),
        ({"pipeline": 2}, None, "300", 300, 300),
    ],
)
def test_every_group_waits_as_long_as_it_is_told_and_longer_than_the_watchdog(
    parallel: dict[str, int], timeout: float | None, word: str | None, world: float, others: float
) -> None:
    run = small_run("pre_ln", parallel=parallel, pipeline={"timeout": timeout})
    assert run_workers(2, limits, run, word) == [(world, {others})] * 2
