"""An exception in the middle of a step, on every process: the next step is as if it had not been."""

from typing import Any

import pytest
import torch.distributed as dist

from depthbench.config.schema import RunConfig
from depthbench.pipeline.communicator import Handle
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from tests.harness import run_workers
from tests.models import Weights, assemble, assert_close, load_model, model_pieces, small_run, start_model
from tests.parallel.test_layouts import microbatches, reference_step

RESIDUAL: dict[str, Any] = {"sublayers_per_block": 1}


class Interrupted(Exception):
    pass


def interrupt_at(number: int) -> Any:
    """From now on the `number`-th wait for a message raises instead; returns what undoes it."""
    wait, waits = Handle.wait, 0

    def interrupted(self: Handle) -> None:
        nonlocal waits
        waits += 1
        if waits == number:
            raise Interrupted(str(self.label))
        wait(self)

    Handle.wait = interrupted  # type: ignore[method-assign]

    def undo() -> None:
        Handle.wait = wait  # type: ignore[method-assign]

    return undo


def step_after_an_interrupted_one(
    rank: int, world_size: int, store: str, run: RunConfig, weights: Weights, at: tuple[int, ...]
) -> tuple[float, int, bool, Any]:
    """Loss of the second step, what the first one has left in the cache, whether the transport still counts as
    interrupted, and the second step's gradients."""
    model = start_model(rank, world_size, store, run)
    load_model(model, weights)
    optimizer = Optimizer(run, model)
    batches = microbatches(run, 0, 0, 1)
    optimizer.zero_grad()
    undo = interrupt_at(at[rank])
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


# the number of each rank's wait that is interrupted; what they wait for before is on its way by then
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [(2, 1), (7, 7), (9, 8)])
def test_the_next_step_starts_clean(overlap: bool, at: tuple[int, ...]) -> None:
    train = {"global_batch": 8, "micro_batch": 2}
    parallel = {"pipeline": 2, "virtual_pipeline": 2}
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
    ranks = run_workers(2, step_after_an_interrupted_one, run, weights, at)
    assert any(left for _, left, _, _ in ranks), "the step was interrupted before it had begun to keep anything"
    for loss, _, interrupted, _ in ranks:
        assert loss == pytest.approx(mean, rel=1e-10)
        assert not interrupted
    assert_close(assemble([found for *_, found in ranks]), expected, 1e-10)
