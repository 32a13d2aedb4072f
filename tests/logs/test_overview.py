"""What `depthbench runs` makes of run folders in every state, whole and torn."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from depthbench import cli
from depthbench.logs.overview import read_state, run_folders


def a_run(folder: Path, state: str | None, reason: str = "", steps: tuple[int, ...] = (), age: float = 0.0) -> Path:
    """A folder as training leaves it; it last wrote `age` seconds ago."""
    folder.mkdir(parents=True)
    settings = "name: trial\nresidual: {architecture: hc, streams: 4}\ntrain: {steps: 9}\n"
    (folder / "run.yaml").write_text(settings)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line(step)) + "\n" for step in steps))
    if state:
        (folder / "status.json").write_text(json.dumps({"state": state, "step": 0, "reason": reason}))
    for file in folder.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return folder


def line(step: int) -> dict[str, float]:
    found = {"step": step, "loss": 5 - step / 10, "tokens_per_second": 100.0 * step, "step_seconds": 2.0}
    return {**found, "eta_seconds": 2.0 * (9 - step), **({"eval/loss": 4.5} if step == 2 else {})}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert cli.main(["runs", *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_runs_in_every_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "runs"
    a_run(root / "a", "running", steps=(1, 2, 3))
    a_run(root / "b", "running", steps=(1,), age=3600)
    a_run(root / "grid" / "c", "failed", "step 4: loss is nan", (1, 2, 3))
    a_run(root / "d", None)
    a_run(root / "e", "finished", steps=(8, 9))
    a_run(root / "e" / "inside", "running")  # a run's own folder is not searched
    (root / "data").mkdir()
    found = {Path(state["folder"]).name: state for state in said(capsys, str(root))}
    assert list(found) == ["a", "b", "d", "e", "c"]
    assert [state["state"] for state in found.values()] == ["running", "silent", "new", "finished", "failed"]
    first = found["a"]
    assert (first["name"], first["architecture"], first["step"], first["steps"]) == ("trial", "hc", 3, 9)
    assert (first["loss"], first["valid_loss"], first["tokens_per_second"]) == (4.7, 4.5, 300.0)
    assert (first["eta_seconds"], found["b"]["eta_seconds"]) == (12.0, None)
    assert found["c"]["reason"] == "step 4: loss is nan"
    assert (found["d"]["step"], found["d"]["loss"], found["d"]["quiet_seconds"]) == (0, None, None)

    assert cli.main(["runs", str(root)]) == 0
    shown = capsys.readouterr().out
    for part in ("5 runs", "silent", "3/9", "4.7000", "0m12s"):
        assert part in shown, part


def test_a_step_that_takes_long_is_not_silence(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", "running", steps=(1,), age=900)
    assert read_state(folder).state == "silent"
    slow = json.dumps({**line(1), "step_seconds": 60.0}) + "\n"
    (folder / "metrics.jsonl").write_text(slow)
    os.utime(folder / "metrics.jsonl", (time.time() - 900,) * 2)
    assert read_state(folder).state == "running"


def test_torn_files(tmp_path: Path) -> None:
    """A line that is being written, a status and settings that are not whole."""
    folder = a_run(tmp_path / "a", "running", steps=(1, 2))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert read_state(folder).step == 2
    (folder / "status.json").write_text("")
    (folder / "run.yaml").write_text("name: [")
    state = read_state(folder)
    assert (state.state, state.name, state.steps, state.step) == ("new", "a", None, 2)


def test_a_long_history_is_read_from_its_end(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "a", "running", steps=tuple(range(1, 20_001)))
    assert (folder / "metrics.jsonl").stat().st_size > 2 << 20
    assert (read_state(folder).step, read_state(folder).valid_loss) == (20_000, None)


def test_places_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not list(run_folders(tmp_path / "none"))
    assert said(capsys, str(tmp_path)) == []
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert cli.main(["runs", str(tmp_path / "none")]) == 2
    assert "none is no folder" in capsys.readouterr().err


def a_submission(folder: Path, number: int = 1, name: str = "trial") -> Path:
    """As `depthbench submit` leaves it."""
    inside = folder / "slurm" / str(number)
    inside.mkdir(parents=True)
    (inside / "run.yaml").write_text(f"name: {name}\nresidual: {{architecture: hc, streams: 4}}\ntrain: {{steps: 9}}\n")
    (inside / "submit.sbatch").write_text("#!/bin/bash\n")
    return folder


def journal(folder: Path, age: float, *ended: dict[str, Any]) -> None:
    """What the job noted, `age` seconds ago; what a crash cut short counts for nothing."""
    file = folder / "slurm" / "attempts.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in ended) + '{"attempt": "7.')
    os.utime(file, (time.time() - age,) * 2)


def test_queued_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before their first start there is nothing but submissions, which are no runs; in a sweep's folder too."""
    a_submission(tmp_path / "a", 9)
    a_submission(tmp_path / "a", 10, name="newer")
    a_submission(tmp_path / "sweep" / "hc-0.1")
    (tmp_path / "sweep" / "submit.sbatch").write_text("#!/bin/bash\n")
    a_submission(a_run(tmp_path / "slurm" / "1", "finished"))  # a sweep of that name
    found = {str(Path(state["folder"]).relative_to(tmp_path)): state for state in said(capsys, str(tmp_path))}
    assert {name: state["state"] for name, state in found.items()} == {
        "a": "queued",
        "slurm/1": "finished",
        "sweep/hc-0.1": "queued",
    }
    assert (found["a"]["name"], found["a"]["architecture"], found["a"]["steps"]) == ("newer", "hc", 9)


def test_a_run_that_slurm_refused(tmp_path: Path) -> None:
    """Until it is submitted again, or starts."""
    folder = a_submission(tmp_path / "a")
    (folder / "slurm" / "1" / "refused").write_text("Invalid account")
    assert (read_state(folder).state, read_state(folder).reason) == ("refused", "Invalid account")
    a_submission(folder, 2)
    assert (read_state(folder).state, read_state(folder).reason) == ("queued", "")
    (folder / "slurm" / "2" / "refused").write_text("Invalid account")
    (folder / "status.json").write_text('{"state": "running"}')
    assert (read_state(folder).state, read_state(folder).reason) == ("running", "")


FAILED = {
    "attempt": "7.0",
    "kind": "failed",
    "requeue": True,
    "why": "failed at step 2 (peer); the next resumes from 0",
}
GIVEN_UP = {"attempt": "7.1", "kind": "failed", "requeue": False, "why": "attempts 7.0 and 7.1 failed alike"}


@pytest.mark.parametrize(
    ("status", "ended", "state", "reason"),
    [
        (None, [FAILED], "requeued", FAILED["why"]),
        (None, [FAILED, GIVEN_UP], "failed", GIVEN_UP["why"]),
        ("running", [FAILED, GIVEN_UP], "failed", GIVEN_UP["why"]),
        ("running", [{"attempt": "7.0", "kind": "lost", "requeue": False, "why": "no more"}], "lost", "no more"),
        ("stopped", [{"attempt": "7.0", "kind": "stopped", "requeue": True, "why": "SIGUSR1"}], "requeued", "SIGUSR1"),
        ("stopped", [{"attempt": "7.0", "kind": "paused", "requeue": False, "why": "at 5"}], "stopped", "at 5"),
        ("finished", [{"attempt": "7.0", "kind": "finished", "requeue": False, "why": "at 9"}], "finished", ""),
    ],
)
def test_a_jobs_word_on_an_attempt_that_has_ended(
    tmp_path: Path, status: str | None, ended: list[dict[str, Any]], state: str, reason: str
) -> None:
    """Its processes may have had no time to write one, or said that they run."""
    folder = a_submission(a_run(tmp_path / "a", status, age=20))
    journal(folder, 10, *ended)
    assert (read_state(folder).state, read_state(folder).reason) == (state, reason)


def test_the_next_attempt_has_the_last_word(tmp_path: Path) -> None:
    folder = a_submission(a_run(tmp_path / "a", "running", steps=(1, 2), age=5))
    journal(folder, 10, FAILED)
    assert (read_state(folder).state, read_state(folder).reason) == ("running", "")
