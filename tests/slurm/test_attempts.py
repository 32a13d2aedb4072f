"""What follows when an attempt has ended."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from depthbench.slurm.attempts import Decision, Ended, Kind, append, decide, read

FAILED = Ended("7.0", Kind.FAILED, step=12, saved=10, reason="RuntimeError: Connection closed by peer [10.0.0.3]:41210")
MANY = 50


@pytest.mark.parametrize("kind", [Kind.FINISHED, Kind.PAUSED])
def test_a_run_that_got_where_it_should_is_over(kind: Kind) -> None:
    decision = decide([], Ended("7.0", kind, 20, 20), MANY)
    assert (decision.requeue, decision.code) == (False, 0)


@pytest.mark.parametrize("kind", [Kind.CANCELLED, Kind.SUPERSEDED])
def test_what_its_user_ended_stays_ended(kind: Kind) -> None:
    decision = decide([], Ended("7.0", kind, 12, 10), MANY)
    assert (decision.requeue, decision.code) == (False, 1)


def test_a_stopped_run_goes_on_as_often_as_allowed() -> None:
    """Stops are no failures, however many there are without a step between them."""
    before = [Ended(f"7.{restart}", Kind.STOPPED, 12, 12, "SIGUSR1") for restart in range(3)]
    assert decide(before, Ended("7.3", Kind.STOPPED, 12, 12, "SIGUSR1"), 4).requeue
    last = decide(before, Ended("7.4", Kind.STOPPED, 12, 12, "SIGUSR1"), 4)
    assert not last.requeue and "requeued 4 times, --max-requeues=4 allows no more" in last.why


def test_one_failure_is_tried_again() -> None:
    decision = decide([], FAILED, MANY)
    assert decision.requeue and decision.why.endswith("the next attempt resumes from step 10")


def test_the_same_failure_twice_is_not() -> None:
    """Also with a stop between them, and where only ports differ; and it is said which."""
    again = replace(FAILED, attempt="7.2", reason="RuntimeError: Connection closed by peer [10.0.0.4]:55001")
    decision = decide([FAILED, Ended("7.1", Kind.STOPPED, 11, 11, "SIGTERM")], again, MANY)
    assert not decision.requeue and decision.code == 1
    assert "attempts 7.0 and 7.2 failed alike, at step 12: RuntimeError" in decision.why


def test_addresses_make_no_difference() -> None:
    """Whatever letters they have."""
    one = replace(FAILED, reason="RuntimeError: cannot pickle <object at 0x7f3a12bc>")
    other = replace(FAILED, attempt="7.1", reason="RuntimeError: cannot pickle <object at 0x7fde9f00>")
    assert not decide([one], other, MANY).requeue


@pytest.mark.parametrize("other", [{"step": 13}, {"reason": "OutOfMemoryError"}])
def test_another_failure_is(other: dict[str, object]) -> None:
    assert decide([FAILED], replace(FAILED, attempt="7.1", **other), MANY).requeue  # type: ignore[arg-type]


def test_an_earlier_jobs_failures_do_not_count() -> None:
    """A person has looked at them, and submitted it again."""
    assert decide([FAILED], replace(FAILED, attempt="8.0"), MANY).requeue


def test_failures_of_different_kinds_end_too() -> None:
    """If none of three in a row has got to a new checkpoint."""
    before = [FAILED, Ended("7.1", Kind.LOST, 11, 10, "node")]
    third = Ended("7.2", Kind.FAILED, 13, 10, "OutOfMemoryError")
    assert not decide(before, third, MANY).requeue
    assert decide(before, replace(third, saved=13), MANY).requeue
    assert decide([FAILED, Ended("7.1", Kind.STOPPED, 10, 10)], third, MANY).requeue


def test_lost_nodes_at_the_same_step_are_an_accident() -> None:
    before = [Ended("7.0", Kind.LOST, 12, 10, "node")]
    assert decide(before, Ended("7.1", Kind.LOST, 12, 10, "node"), MANY).requeue


def test_a_mistake_of_the_user_is_not_tried_again() -> None:
    decision = decide([], replace(FAILED, refused=True, reason="UserError: no such corpus"), MANY)
    assert not decision.requeue and "UserError: no such corpus" in decision.why


def test_the_journal_gives_back_what_it_got(tmp_path: Path) -> None:
    """Also when crashes have cut lines short, the last and one before it; and it tells others what was decided."""
    journal = tmp_path / "slurm" / "attempts.jsonl"
    assert read(journal) == []
    ended = [FAILED, Ended("7.1", Kind.FINISHED, 20, 20)]
    for one in ended:
        append(journal, one, Decision(one is FAILED, "why"))
        with open(journal, "a") as file:
            file.write('{"attempt": "7.2", "ki')
        assert read(journal) == ended[: ended.index(one) + 1]
    told = [json.loads(line) for line in journal.read_text().splitlines()[::2]]
    assert [(line["requeue"], line["why"]) for line in told] == [(True, "why"), (False, "why")]
    journal.write_bytes(b'7\nnull\n{"attempt": "7.0"}\n{"kind": 3}\n\xff\0\n')
    assert read(journal) == []
