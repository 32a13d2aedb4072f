"""What to do when an attempt at a run has ended: requeue its job, or stop.

A job makes one attempt after another: Slurm starts its script anew, with one more in the restart count, each time the
job is requeued. What ended each is kept in the run folder, one JSON line an attempt, so that the next one can tell an
accident from a failure that would repeat itself for ever.

Imports nothing but the standard library: a job's script asks it on a node that may have torch only in a container.
"""

import enum
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

FAILURES_WITHOUT_CHECKPOINT = 3  # in a row, after which a job stops although each failed in its own way


class Kind(enum.Enum):
    """finished: train.steps is reached. paused: train.stop_at is. stopped: by a signal, after a checkpoint. failed: an
    error, or a process that died. lost: nobody was left to say why, or Slurm took the nodes. cancelled: by its user.
    superseded: another attempt owns the run folder."""

    FINISHED = "finished"
    PAUSED = "paused"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


def job_of(attempt: str) -> str:
    """JOB of JOB.RESTART, with its task in an array."""
    return attempt.split(".")[0]


@dataclass(frozen=True)
class Ended:
    """An attempt that is over. attempt: JOB.RESTART, in an array JOB_TASK.RESTART. step: where its trainer said that it
    ended, or else that of the last line of metrics, which may be an earlier attempt's. saved: step of the newest
    complete checkpoint, 0 without one. refused: the error is a mistake of the user, which no further attempt mends."""

    attempt: str
    kind: Kind
    step: int
    saved: int
    reason: str = ""
    refused: bool = False

    @property
    def job(self) -> str:
        return job_of(self.attempt)

    @property
    def restart(self) -> int:
        return int(self.attempt.split(".")[1])

    @property
    def failure(self) -> tuple[int, str]:
        """Equal for failures that are taken to be one: numbers in an error's text are ports, process ids, addresses."""
        return self.step, re.sub(r"0x[0-9a-f]+|\d+", "#", self.reason)


@dataclass(frozen=True)
class Decision:
    """code: exit status of the job where it is not requeued."""

    requeue: bool
    why: str
    code: int = 1


def decide(before: Sequence[Ended], now: Ended, max_requeues: int) -> Decision:
    """before: what `read` found, in order; only attempts of the same job count.

    max_requeues: how often a job may be requeued, by itself or by Slurm.
    """
    if now.kind in (Kind.FINISHED, Kind.PAUSED):
        return Decision(False, f"{now.kind.value} at step {now.step}", code=0)
    if now.kind in (Kind.CANCELLED, Kind.SUPERSEDED):
        return Decision(False, f"{now.kind.value} at step {now.step}: {now.reason}")
    if now.refused:
        return Decision(False, f"another attempt would not help: {now.reason}")
    earlier = [ended for ended in before if ended.job == now.job]
    same = [ended for ended in earlier if ended.kind is Kind.FAILED and ended.failure == now.failure]
    if now.kind is Kind.FAILED and same:
        return Decision(
            False, f"attempts {same[-1].attempt} and {now.attempt} failed alike, at step {now.step}: {now.reason}"
        )
    latest = [*earlier, now][-FAILURES_WITHOUT_CHECKPOINT:]
    if len(latest) == FAILURES_WITHOUT_CHECKPOINT and all(
        ended.kind in (Kind.FAILED, Kind.LOST) and ended.saved == now.saved for ended in latest
    ):
        return Decision(
            False,
            f"{FAILURES_WITHOUT_CHECKPOINT} attempts in a row ended without a new checkpoint after step {now.saved}; "
            f"the last: {now.reason}",
        )
    what = f"{now.kind.value} at step {now.step}" + (f" ({now.reason})" if now.reason else "")
    if now.restart >= max_requeues:
        return Decision(False, f"{what}; requeued {now.restart} times, --max-requeues={max_requeues} allows no more")
    return Decision(True, f"{what}; the next attempt resumes from step {now.saved}")


def read(journal: Path) -> list[Ended]:
    """Attempts that are over, in order; a line that a crash cut short is left out."""
    found: list[Ended] = []
    names = [field.name for field in fields(Ended)]
    for line in journal.read_bytes().splitlines() if journal.is_file() else ():
        try:
            values = json.loads(line)
            found.append(Ended(**{name: values[name] for name in names} | {"kind": Kind(values["kind"])}))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def append(journal: Path, ended: Ended, decision: Decision) -> None:
    """Note how an attempt ended, and for those who read it (`depthbench runs`) what was decided."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    line = {**asdict(ended), "kind": ended.kind.value, "requeue": decision.requeue, "why": decision.why}
    with open(journal, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a crash cut the last line short
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")
