"""An exception in the middle of a step, on every process: the next step is as if it had not been."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from depthbench.config.schema import RunConfig
from depthbench.model.stage import DecoderStage
from depthbench.pipeline.cache import HistoryCache
from depthbench.pipeline.communicator import Handle
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from tests.harness import run_workers
from tests.models import Weights, assemble, assert_close, load_model, model_pieces, small_run, start_model
from tests.parallel.test_layouts import microbatches, reference_step

RESIDUAL: dict[str, Any] = {"sublayers_per_block": 1}


class Interrupted(Exception):
    pass


def interrupt_at(where: tuple[type, str], number: int) -> Callable[[], None]:
    """From now on the `number`-th call of a method raises instead; returns what undoes it."""
    owner, name = where
    method, calls = getattr(owner, name), 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Interrupted
        return method(*args)

    setattr(owner, name, interrupted)
    return lambda: setattr(owner, name, method)


WAIT = (Handle, "wait")
FORWARD = (DecoderStage, "forward")
BACKWARD = (HistoryCache, "_collect")  # in the backward pass of a chunk that has read from the cache


def step_after_an_interrupted_one(
    rank: int,
    world_size: int,
    store: str,
    run: RunConfig,
    weights: Weights,
    where: tuple[type, str],
    at: tuple[int, ...],
) -> tuple[float, int, bool, Any]:
    """Loss of the second step, what the first one has left in the cache, whether the transport still counts as
    interrupted, and the second step's gradients."""
    model = start_model(rank, world_size, store, run)
    load_model(model, weights)
    optimizer = Optimizer(run, model)
    context = model.context
    batches = microbatches(run, 0, context.dp_rank, context.dp_size)
    optimizer.zero_grad()
    undo = interrupt_at(where, at[context.pp_group.rank()])
    with pytest.raises(Interrupted) as interruption:  # its traceback keeps what is being sent, which thus arrives
        run_microbatches(model, batches, forward_only=False)
    undo()
    assert model.transport
    replaced = model.transport.link.flows.values()
    left = len(model.transport.cache.values) + len(model.transport.cache.pending)
    optimizer.zero_grad()
    loss = run_microbatches(model, batches, forward_only=False)
    model.transport.cache.assert_empty()
    assert interruption
    known = dist.distributed_c10d._world.pg_map
    assert not [group for group in replaced if group in known]
    assert all(group in known for group in model.transport.link.flows.values())
    return loss.mean, left, model.transport.interrupted, model_pieces(model, "main_grad")


# the number of each stage's call that is interrupted; what they wait for before is on its way by then
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("where", "at", "replicas"),
    [
        (WAIT, (2, 1), 1),
        (WAIT, (7, 7), 1),
        (WAIT, (9, 8), 1),
        (FORWARD, (4, 3), 1),
        (BACKWARD, (2, 12), 1),
        (FORWARD, (4, 3), 2),
        (BACKWARD, (2, 12), 2),
    ],
    ids=lambda value: value[1] if value in (WAIT, FORWARD, BACKWARD) else str(value),
)
def test_the_next_step_starts_clean(overlap: bool, where: tuple[type, str], at: tuple[int, ...], replicas: int) -> None:
    """In a wait for a message, and in a chunk's forward and backward; also where gradients are being reduced over
    data-parallel ranks meanwhile."""
    train = {"global_batch": 8 * replicas, "micro_batch": 2}
    parallel = {"pipeline": 2, "virtual_pipeline": 2, "overlap_grad_reduce": replicas > 1, "bucket_size": 5000}
    model = {"num_layers": 8}
    run = small_run(
        "block_attnres",
        RESIDUAL,
        model=model,
        train=train,
        parallel=parallel,
        pipeline={"overlap_p2p": overlap, "timeout": None},
    )
    weights, expected, mean, _ = reference_step(run, "block_attnres", RESIDUAL)
    ranks = run_workers(2 * replicas, step_after_an_interrupted_one, run, weights, where, at)
    assert any(left for _, left, _, _ in ranks), "the step was interrupted before it had begun to keep anything"
    for loss, _, interrupted, _ in ranks:
        assert loss == pytest.approx(mean, rel=1e-10)
        assert not interrupted
    assert_close(assemble([found for *_, found in ranks]), expected, 1e-10)
