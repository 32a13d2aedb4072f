"""A stage that waits for ever is ended with a message that says for what; one that does not is left alone.

The watchdog's thread looks again and again by the real clock; how long something has waited is told by a clock that
the tests move. Where it must not fire, another wait comes later for which it must.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import ProcessExitedException, start_processes

from depthbench.config.schema import RunConfig
from depthbench.pipeline import watchdog as module
from depthbench.pipeline.watchdog import EXIT_CODE, Watchdog
from depthbench.training.step import run_microbatches
from tests.harness import start_workers
from tests.models import small_run, start_model
from tests.parallel.test_layouts import microbatches

LIMIT = 0.02
PATIENCE = 60  # seconds until a test gives up


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ours = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=ours, sleep=time.sleep))
    return ours


class Ended:
    """An `end` that notes what it is told instead of ending the process."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.delays: list[float] = []
        self.event = threading.Event()

    def __call__(self, text: str, delay: float) -> None:
        self.said.append(text)
        self.delays.append(delay)
        self.event.set()

    def wait(self) -> str:
        assert self.event.wait(PATIENCE), "the watchdog has not fired"
        (text,) = self.said
        return text


class Work:
    """A message in flight."""

    def __init__(self) -> None:
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed


def watching() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "pipeline-watchdog"}


def watchdog(limit: float | None = LIMIT) -> tuple[Watchdog, Ended]:
    """Its thread ends when it has fired."""
    ended = Ended()
    return Watchdog(limit, "rank 3, pipeline stage 1", ended), ended


def test_a_wait_that_does_not_end_is_named(clock: Clock) -> None:
    """With the process, the message and the limit; once."""
    dog, ended = watchdog()
    with dog.waiting("forward message of microbatch 2, chunk 0 to 1"):
        clock.now += 7
        text = ended.wait()
    assert text == (
        "rank 3, pipeline stage 1: waited 7 s for the forward message of microbatch 2, chunk 0 to 1 (limit 0.02 s); "
        "giving up"
    )


def test_the_end_comes_after_the_others_have_looked(clock: Clock) -> None:
    """The first process to end takes the others with it, and each looks four times a limit, at least every 5 s."""
    dog, ended = watchdog()
    with dog.waiting("first"):
        clock.now += 7
        ended.wait()
    assert ended.delays == [2 * LIMIT / 4]


def test_a_wait_that_has_ended_is_forgotten(clock: Clock) -> None:
    """Also one that ended with an error: what fires later names a later wait."""
    dog, ended = watchdog()
    with dog.waiting("first"):
        pass
    with pytest.raises(RuntimeError), dog.waiting("second"):
        raise RuntimeError
    clock.now += LIMIT / 2
    with dog.waiting("third"):
        clock.now += 7
        assert "for the third" in ended.wait()


def test_the_longest_of_several_waits_is_named(clock: Clock) -> None:
    """The others may be its consequence."""
    dog, ended = watchdog()
    with dog.waiting("first"):
        clock.now += LIMIT / 2
        with dog.waiting("second"):
            clock.now += 7
            assert "for the first" in ended.wait()


def test_a_message_is_watched_until_it_is_through(clock: Clock) -> None:
    """On a GPU the wait returns before the message has come."""
    dog, ended = watchdog()
    with dog.waiting("late", Work()):
        pass
    clock.now += 7
    assert "for the late" in ended.wait()


def test_a_message_that_is_through_is_forgotten(clock: Clock) -> None:
    """Whether it is when the wait returns, or only later."""
    dog, ended = watchdog()
    before, later = Work(), Work()
    with dog.waiting("before", before):
        before.completed = True
    with dog.waiting("later", later):
        pass
    later.completed = True
    clock.now += LIMIT / 2
    with dog.waiting("third"):
        clock.now += 7
        assert "for the third" in ended.wait()


def test_without_a_limit_nobody_watches() -> None:
    """No thread, and waits cost nothing."""
    before = watching()
    dog, ended = watchdog(None)
    assert watching() == before
    with dog.waiting("first", Work()), dog.waiting("second"):
        pass
    assert not ended.said


def test_a_process_that_is_given_up_ends_with_a_status_of_its_own() -> None:
    """On stderr, from another thread than the one that waits."""
    code = """
import threading
from depthbench.pipeline.watchdog import Watchdog
with Watchdog(0.01, "rank 0").waiting("forward message"):
    threading.Event().wait(60)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == EXIT_CODE == 4
    assert re.search(r"rank 0: waited \d+ s for the forward message \(limit 0.01 s\); giving up", ended.stderr)


def silenced(rank: int, world_size: int, store: str) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{store}/gone/error.json"
    sys.stderr.close()
    with Watchdog(LIMIT, "rank 0").waiting("forward message"):
        threading.Event().wait(PATIENCE)


def test_it_ends_where_it_can_say_nothing() -> None:
    """With stderr closed, and torchrun's error file in a folder that is not there: the status is the same."""
    assert start_workers(1, silenced)[0] == [EXIT_CODE]


def waiting_stage(rank: int, store: str, run: RunConfig) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4")
    torch.set_num_threads(1)
    model = start_model(rank, 4, store, run)
    if rank == 1:
        signal.pause()  # until it is ended
    run_microbatches(model, microbatches(run, 0, 0, 1), forward_only=False)


def test_every_waiting_rank_says_for_what(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Although the first process that ends has the others ended at once, here as by torchrun."""
    run = small_run("pre_ln", parallel={"pipeline": 4}, train={"global_batch": 8}, pipeline={"timeout": 8.0})
    started = start_processes(waiting_stage, (str(tmp_path / "store"), run), nprocs=4, join=False, start_method="fork")
    assert started
    with pytest.raises(ProcessExitedException) as caught:
        while not started.join():
            pass
    assert caught.value.exit_code == EXIT_CODE
    said = capfd.readouterr().err
    for rank, receiver in ((0, 1), (2, 2), (3, 3)):  # rank 0 for its own message to be taken
        message = f"forward message of microbatch 0, chunk {receiver - 1} to {receiver}"
        assert re.search(rf"rank {rank}, pipeline stage {rank}: waited \d+ s for the {message}", said), said
