"""A stage that waits for ever is ended with a message that says for what; one that does not is left alone.

The watchdog's thread looks again and again by the real clock; how long something has waited is told by a clock that
the tests move. Where it must not fire, another wait comes later for which it must.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from depthbench.pipeline import watchdog as module
from depthbench.pipeline.watchdog import EXIT_CODE, Watchdog

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
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=ours))
    return ours


class Ended:
    """An `end` that notes what it is told instead of ending the process."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.event = threading.Event()

    def __call__(self, text: str) -> None:
        self.said.append(text)
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


@contextmanager
def watchdog(limit: float | None = LIMIT) -> Iterator[tuple[Watchdog, Ended]]:
    ended = Ended()
    dog = Watchdog(limit, "rank 3, pipeline stage 1", ended)
    yield dog, ended
    dog.close()


def test_a_wait_that_does_not_end_is_named(clock: Clock) -> None:
    """With the process, the message and the limit; once."""
    with watchdog() as (dog, ended), dog.waiting("forward message of microbatch 2, chunk 0 to 1"):
        clock.now += 7
        text = ended.wait()
    assert text == (
        "rank 3, pipeline stage 1: waited 7 s for the forward message of microbatch 2, chunk 0 to 1 (limit 0 s); "
        "giving up"
    )


def test_a_wait_that_has_ended_is_forgotten(clock: Clock) -> None:
    """Also one that ended with an error: what fires later names a later wait."""
    with watchdog() as (dog, ended):
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
    with watchdog() as (dog, ended), dog.waiting("first"):
        clock.now += LIMIT / 2
        with dog.waiting("second"):
            clock.now += 7
            assert "for the first" in ended.wait()


def test_a_message_is_watched_until_it_is_through(clock: Clock) -> None:
    """On a GPU the wait returns before the message has come."""
    with watchdog() as (dog, ended):
        with dog.waiting("late", Work()):
            pass
        clock.now += 7
        assert "for the late" in ended.wait()


def test_a_message_that_is_through_is_forgotten(clock: Clock) -> None:
    """Whether it is when the wait returns, or only later."""
    with watchdog() as (dog, ended):
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
    with watchdog(None) as (dog, ended):
        assert watching() == before
        with dog.waiting("first", Work()), dog.waiting("second"):
            pass
        assert not ended.said


def test_a_closed_watchdog_is_gone() -> None:
    """Its thread ends, without a word."""
    before = watching()
    with watchdog(3600) as (dog, ended):
        (thread,) = watching() - before
        assert thread.daemon
        with dog.waiting("first"):
            dog.close()
            thread.join(PATIENCE)
        assert not thread.is_alive() and not ended.said


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
    assert re.search(r"rank 0: waited \d+ s for the forward message \(limit 0 s\); giving up", ended.stderr)
