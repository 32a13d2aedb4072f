"""What a job's script is told before and after its processes run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthbench.checkpoint import fence
from depthbench.slurm import job
from depthbench.slurm.attempts import Decision, Ended, Kind, append, read
from depthbench.training.status import read_status

LAST, MANY = 20, 50


def test_it_needs_nothing_but_the_standard_library() -> None:
    """Outside a container there may be no torch; and it takes no second."""
    code = "import sys; import depthbench.slurm.job; assert not {'torch', 'yaml', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ports_of_ten_thousand_jobs() -> None:
    """None is reserved, X11's, Slurm's or ephemeral; neighbours and a job's own attempts never meet."""
    ports = [job.port(number, 0) for number in range(1, 10_001)]
    assert min(ports) > 6818 and max(ports) < 32768
    assert all(first != second for first, second in pairwise(ports))
    assert len({job.port(123_456_789, restart) for restart in range(51)}) == 51


def checkpoint(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")


def metrics(folder: Path, step: int, then: bytes = b'{"step": 99') -> None:
    lines = [json.dumps({"step": number, "loss": 1.0}) + "\n" for number in range(1, step + 1)]
    (folder / "metrics.jsonl").write_bytes("".join(lines).encode() + then)


def status(folder: Path, attempt: str, state: str, step: int, reason: str = "") -> None:
    told = {"state": state, "step": step, "reason": reason, "attempt": attempt}
    (folder / "status.json").write_text(json.dumps(told))


def error(logs: Path, node: int, text: str) -> None:
    folder = logs / f"node-{node}" / "7.0_x" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(json.dumps({"message": {"message": text, "extraInfo": {}}}))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What Slurm's commands print, by name, or by the whole command; None where it does not answer. `requeue`: why it
    refuses that."""
    said: dict[str, str | None] = {"squeue": "", "scontrol": "JobState=RUNNING Reason=None", "requeue": ""}
    monkeypatch.setattr(job, "_slurm", lambda *words, **seconds: said.get(" ".join(words), said[words[0]]))
    monkeypatch.setattr(job, "_requeue", lambda number: said["requeue"])
    return said


def test_an_attempt_begins_by_owning_the_folder(tmp_path: Path, slurm: dict[str, str | None]) -> None:
    assert job.begin(tmp_path, "7.0", LAST, LAST, MANY) == 0
    assert fence.owner(tmp_path) == "7.0"


def test_a_finished_run_is_not_begun(tmp_path: Path, slurm: dict[str, str | None]) -> None:
    checkpoint(tmp_path, LAST)
    assert job.begin(tmp_path, "7.0", LAST, LAST, MANY) == job.NOTHING_TO_DO
    assert fence.owner(tmp_path) is None


@pytest.mark.parametrize(
    ("before", "steps", "after"),
    [
        ("running", LAST, ("finished", LAST, "")),
        ("failed", LAST + 1, ("stopped", LAST, f"train.stop_at={LAST}")),
        ("finished", LAST, ("finished", 3, "")),
        ("stopped", LAST, ("stopped", 3, "")),
    ],
)
def test_a_run_that_died_after_its_last_checkpoint_is_finished(
    tmp_path: Path, slurm: dict[str, str | None], before: str, steps: int, after: tuple[str, int, str]
) -> None:
    """It could not say so; but nothing is left to do, so nobody else would. Unless another job is at work on it."""
    checkpoint(tmp_path, LAST)
    fence.claim(tmp_path, "6.0")
    status(tmp_path, "6.0", before, 3)
    slurm["squeue"] = "RUNNING\n"
    assert job.begin(tmp_path, "7.0", LAST, steps, MANY) == job.NOTHING_TO_DO
    assert read_status(tmp_path)["state"] == before
    slurm["squeue"] = ""
    assert job.begin(tmp_path, "7.0", LAST, steps, MANY) == job.NOTHING_TO_DO
    told = read_status(tmp_path)
    assert (told["state"], told["step"], told["reason"]) == after


def test_an_attempt_that_left_no_word_is_noted_by_the_next(tmp_path: Path, slurm: dict[str, str | None]) -> None:
    checkpoint(tmp_path, 10)
    metrics(tmp_path, 12)
    job.begin(tmp_path, "7.0", LAST, LAST, MANY)
    assert job.begin(tmp_path, "7.1", LAST, LAST, MANY) == 0
    (lost,) = read(job.journal(tmp_path))
    assert (lost.attempt, lost.kind, lost.step, lost.saved) == ("7.0", Kind.LOST, 12, 10)
    assert fence.owner(tmp_path) == "7.1"


def test_slurm_does_not_requeue_for_ever(
    tmp_path: Path, slurm: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither more often than allowed, nor without a new checkpoint."""
    job.begin(tmp_path, "7.0", LAST, LAST, 0)
    assert job.begin(tmp_path, "7.1", LAST, LAST, 0) == 1
    assert "--max-requeues=0" in capsys.readouterr().out
    for restart in range(3):
        append(job.journal(tmp_path), Ended(f"8.{restart}", Kind.LOST, 3, 0, "node"), Decision(True, ""))
    fence.claim(tmp_path, "8.3")
    assert job.begin(tmp_path, "8.4", LAST, LAST, MANY) == 1
    assert fence.owner(tmp_path) == "8.3"


def test_two_jobs_do_not_share_a_folder(
    tmp_path: Path, slurm: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even where Slurm does not say whether the first is at work."""
    job.begin(tmp_path, "7.0", LAST, LAST, MANY)
    slurm["squeue"] = "RUNNING\n"
    assert job.begin(tmp_path, "8.0", LAST, LAST, MANY) == 1
    slurm["squeue"] = None
    assert job.begin(tmp_path, "8.0", LAST, LAST, MANY) == 1
    said = capsys.readouterr().out
    assert "job 7 is running in" in said and "squeue does not say whether job 7 is still running in" in said
    assert fence.owner(tmp_path) == "7.0"
    slurm["squeue"] = ""
    assert job.begin(tmp_path, "8.0", LAST, LAST, MANY) == 0


def test_a_task_of_an_array_is_a_job_of_its_own(tmp_path: Path, slurm: dict[str, str | None]) -> None:
    """What its siblings do keeps nobody from submitting it again, and what Slurm does to them is not done to it."""
    job.begin(tmp_path, "7_2.0", LAST, LAST, MANY)
    slurm["squeue --noheader --jobs=7 --format=%T"] = "RUNNING\n"
    assert job.begin(tmp_path, "8.0", LAST, LAST, MANY) == 0
    slurm["squeue --noheader --jobs=9_2 --format=%T"] = "RUNNING\n"
    job.begin(tmp_path, "9_2.0", LAST, LAST, MANY)
    assert job.begin(tmp_path, "9_1.0", LAST, LAST, MANY) == 1

    slurm["scontrol"] = "JobState=COMPLETING Reason=None Restarts=3"
    slurm["scontrol show job --oneliner 9_2"] = "JobState=COMPLETING Reason=TimeLimit Restarts=0"
    status(tmp_path, "9_2.0", "stopped", 12, "SIGUSR1")
    assert job.end(tmp_path, tmp_path, "9_2.0", 0, True, MANY) == job.REQUEUE
    assert job.begin(tmp_path, "9_2.1", LAST, LAST, MANY) == 0
    assert [ended.attempt for ended in read(job.journal(tmp_path))] == ["9_2.0"]


Prepare = Callable[[Path, Path], None]


def told(state: str, step: int, reason: str = "", attempt: str = "7.0") -> Prepare:
    return lambda folder, logs: status(folder, attempt, state, step, reason)


def died(*texts: str) -> Prepare:
    """Processes of different nodes, one after another."""

    def prepare(folder: Path, logs: Path) -> None:
        for node, text in reversed(list(enumerate(texts))):
            error(logs, node, text)
        for node in range(len(texts)):
            for file in (logs / f"node-{node}").rglob("error.json"):
                os.utime(file, ns=(node, node))

    return prepare


@pytest.mark.parametrize(
    ("prepare", "status_of_srun", "interrupted", "slurm_says", "kind", "step", "reason", "code"),
    [
        (told("finished", LAST), 0, False, "", Kind.FINISHED, LAST, "", 0),
        (told("stopped", 15, "train.stop_at=15"), 0, False, "", Kind.PAUSED, 15, "train.stop_at=15", 0),
        (told("stopped", 15, "SIGUSR1"), 0, False, "", Kind.STOPPED, 15, "SIGUSR1", job.REQUEUE),
        (told("stopped", 15, "SIGTERM"), 1, False, "", Kind.STOPPED, 15, "SIGTERM", job.REQUEUE),
        # srun's status was lost to a signal; what the trainer wrote counts
        (told("finished", LAST), 138, False, "", Kind.FINISHED, LAST, "", 0),
        # an earlier attempt's word
        (told("stopped", 9, "SIGUSR1", "6.0"), 0, False, "", Kind.FINISHED, 12, "", 0),
        (told("finished", 9, "", "6.0"), 1, False, "", Kind.FAILED, 12, "a process died without a word", job.REQUEUE),
        (
            told("failed", 12, "step 13: loss is nan"),
            1,
            False,
            "",
            Kind.FAILED,
            12,
            "step 13: loss is nan",
            job.REQUEUE,
        ),
        (told("running", 10), 1, False, "", Kind.FAILED, 12, "a process died without a word", job.REQUEUE),
        # the first to die says why
        (
            died("OutOfMemoryError: 8", "RuntimeError: peer"),
            1,
            False,
            "",
            Kind.FAILED,
            12,
            "OutOfMemoryError: 8",
            job.REQUEUE,
        ),
        (died("UserError: no corpus"), 1, False, "", Kind.FAILED, 12, "UserError: no corpus", 1),
        # Slurm ends the job: the user does, or the time limit, before or after a save
        (told("running", 10), 143, True, "JobState=COMPLETING Reason=None", Kind.CANCELLED, 12, None, 1),
        (told("stopped", 15, "SIGTERM"), 0, True, "JobState=COMPLETING Reason=None", Kind.CANCELLED, 12, None, 1),
        (told("running", 10), 143, True, "JobState=COMPLETING Reason=TimeLimit", Kind.FAILED, 12, None, job.REQUEUE),
        (told("stopped", 15, "SIGUSR1"), 143, True, "Reason=TimeLimit", Kind.STOPPED, 15, "SIGUSR1", job.REQUEUE),
        # scancel --full --signal=TERM: the job runs on
        (told("stopped", 15, "SIGTERM"), 0, True, "JobState=RUNNING", Kind.STOPPED, 15, "SIGTERM", job.REQUEUE),
        # Slurm does not say why it ends the job
        (told("stopped", 15, "SIGUSR1"), 143, True, None, Kind.STOPPED, 15, "SIGUSR1", job.REQUEUE),
        (told("running", 10), 143, True, None, Kind.FAILED, 12, "a process died without a word", job.REQUEUE),
    ],
)
def test_how_an_attempt_ended(
    tmp_path: Path,
    slurm: dict[str, str | None],
    prepare: Prepare,
    status_of_srun: int,
    interrupted: bool,
    slurm_says: str | None,
    kind: Kind,
    step: int,
    reason: str | None,
    code: int,
) -> None:
    slurm["scontrol"] = slurm_says
    checkpoint(tmp_path, 10)
    metrics(tmp_path, 12)
    logs = tmp_path / "slurm" / "logs" / "7.0"
    job.begin(tmp_path, "7.0", LAST, LAST, MANY)
    prepare(tmp_path, logs)
    assert job.end(tmp_path, logs, "7.0", status_of_srun, interrupted, MANY) == code
    (ended,) = read(job.journal(tmp_path))
    assert (ended.attempt, ended.kind, ended.step, ended.saved) == ("7.0", kind, step, 10)
    assert reason is None or ended.reason == reason


def test_an_attempt_that_was_superseded_ends_quietly(tmp_path: Path, slurm: dict[str, str | None]) -> None:
    job.begin(tmp_path, "7.0", LAST, LAST, MANY)
    job.begin(tmp_path, "8.0", LAST, LAST, MANY)
    before = (tmp_path / "slurm" / "attempts.jsonl").exists()
    assert job.end(tmp_path, tmp_path, "7.0", 1, False, MANY) == 1
    assert (tmp_path / "slurm" / "attempts.jsonl").exists() == before


@pytest.mark.parametrize("torn", [b"", b"null", b'{"message": ', b'{"message": {}}', b"\xff\0", b"[]"])
def test_files_that_are_not_whole_decide_nothing(tmp_path: Path, slurm: dict[str, str | None], torn: bytes) -> None:
    """A process may be killed while it writes, and a lost node may leave anything."""
    metrics(tmp_path, 12, then=torn + b"\n")
    logs = tmp_path / "slurm" / "logs" / "7.0"
    error(logs, 0, "RuntimeError: peer")
    error(logs, 1, "")
    (torn_error,) = (logs / "node-1").rglob("error.json")
    torn_error.write_bytes(torn)
    job.begin(tmp_path, "7.0", LAST, LAST, MANY)
    (tmp_path / "status.json").write_bytes(torn)
    assert job.end(tmp_path, logs, "7.0", 1, False, MANY) == job.REQUEUE
    (ended,) = read(job.journal(tmp_path))
    assert (ended.kind, ended.step, ended.reason) == (Kind.FAILED, 12, "RuntimeError: peer")


def test_a_requeue_that_slurm_refuses_ends_the_job(
    tmp_path: Path, slurm: dict[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    job.begin(tmp_path, "7.0", LAST, LAST, MANY)
    slurm["requeue"] = "Access denied"
    assert job.end(tmp_path, tmp_path, "7.0", 1, False, MANY) == 1
    assert "Slurm refused to requeue the job: Access denied; go on with: sbatch" in capsys.readouterr().out
    last = json.loads(job.journal(tmp_path).read_text().splitlines()[-1])
    assert (last["attempt"], last["requeue"]) == ("7.0", False) and "Access denied" in last["why"]


def scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> list[float]:
    """A stand-in on PATH that notes its calls. Returns the seconds slept, which take no time."""
    script = folder / "scontrol"
    script.write_text(f'#!/bin/bash\necho "$@" >> "{folder}/calls"\n{text}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    pauses: list[float] = []
    monkeypatch.setattr(job, "time", SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses)))
    return pauses


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("error", "failures", "found", "asked"),
    [
        ("Unable to contact slurm controller", 3, "JobState=RUNNING\n", 4),
        ("Unable to contact slurm controller", 99, None, 10),
        ("slurm_load_jobs error: Invalid job id specified", 99, "", 1),
    ],
)
def test_a_question_is_asked_again_for_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, failures: int, found: str | None, asked: int
) -> None:
    """Unless the answer is that there is no such job."""
    text = f'[ "$(wc -l < "{tmp_path}/calls")" -gt {failures} ] || {{ echo "{error}" >&2; exit 1; }}'
    scontrol(tmp_path, monkeypatch, f"{text}\necho JobState=RUNNING")
    assert job._slurm("scontrol", "show", "job", "7_2") == found
    assert calls(tmp_path) == ["show job 7_2"] * asked


def test_a_question_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that hangs, or that is not there."""
    scontrol(tmp_path, monkeypatch, "exec sleep 1000")
    assert job._slurm("scontrol", "show", "job", "7", seconds=0.2) is None
    assert job._slurm(str(tmp_path / "squeue")) is None


@pytest.mark.parametrize(("refusals", "said"), [(3, ""), (99, "Unable to contact slurm controller")])
def test_a_requeue_is_tried_for_some_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int, said: str
) -> None:
    """And then no longer."""
    error = "Unable to contact slurm controller"
    text = f'[ "$(wc -l < "{tmp_path}/calls")" -gt {refusals} ] || {{ echo "{error}" >&2; exit 1; }}'
    pauses = scontrol(tmp_path, monkeypatch, text)
    assert job._requeue("7_2") == said
    assert set(calls(tmp_path)) == {"requeue 7_2"} and len(calls(tmp_path)) == len(pauses) + 1
    assert len(pauses) == 3 if not said else 120 < sum(pauses) < 600
