"""Where runs stand, read from what they left in their folders. No run is touched, and none has to be alive."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .jsonl import last_lines

REFUSED = "refused"  # a file in a submission that Slurm did not take, with what it said
SILENT = 600.0  # seconds without a word, beyond ten steps' time, after which a run is hardly alive


@dataclass(frozen=True)
class RunState:
    """One run folder.

    state: `status.json`'s running, stopped, finished or failed; `silent` where a running one has written nothing for
    long; `new` before its first start, `queued` if it was submitted, `refused` if Slurm did not take that. Where the
    last word is a job's, on how an attempt ended: `requeued`, or stopped, finished, failed, lost or cancelled for good.
    step: the last one in its metrics; steps: how many it is to have. loss, tokens_per_second: of that step. valid_loss:
    the newest. eta_seconds: to its end, at its pace of late, if it runs. quiet_seconds: since it wrote. reason: why it
    stopped or failed or was refused, and what the job decided.
    """

    folder: str
    name: str
    architecture: str
    state: str
    step: int
    steps: int | None
    loss: float | None
    valid_loss: float | None
    tokens_per_second: float | None
    eta_seconds: float | None
    quiet_seconds: float | None
    reason: str


def run_folders(root: Path) -> Iterator[Path]:
    """Run folders at or under `root`, by name; what lies inside a run's is its own, its submissions too."""
    if (root / "run.yaml").is_file() or (root / "status.json").is_file() or _submissions(root):
        yield root
        return
    for entry in sorted(root.iterdir()) if root.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            yield from run_folders(entry)


def _submissions(folder: Path) -> list[Path]:
    """What `depthbench submit` has written for jobs of this run, the newest last."""
    scripts = [path for path in folder.glob("slurm/*/submit.sbatch") if path.parent.name.isdigit()]
    return sorted((path.parent for path in scripts), key=lambda path: int(path.name))


def read_state(folder: Path) -> RunState:
    submissions = _submissions(folder)
    settings = _mapping(folder / "run.yaml") or (_mapping(submissions[-1] / "run.yaml") if submissions else {})
    status = _mapping(folder / "status.json")
    metrics = folder / "metrics.jsonl"
    lines = last_lines(metrics)
    last = lines[-1] if lines else {}
    evaluated = [line["eval/loss"] for line in lines if "eval/loss" in line]
    quiet = (
        time.time() - max(path.stat().st_mtime for path in (metrics, folder / "status.json") if path.is_file())
        if (status or lines)
        else None
    )
    state, reason = str(status.get("state", "")), str(status.get("reason", ""))
    if not state:
        state, reason = _waiting(submissions)
    if ended := _last_word(folder):
        state, reason = _after(ended)
    if state == "running" and quiet is not None and quiet > SILENT + 10 * last.get("step_seconds", 0.0):
        state = "silent"
    return RunState(
        folder=str(folder),
        name=str(settings.get("name", folder.name)),
        architecture=str((settings.get("residual") or {}).get("architecture", "")),
        state=state,
        step=int(last.get("step", status.get("step", 0))),
        steps=(settings.get("train") or {}).get("steps"),
        loss=last.get("loss"),
        valid_loss=evaluated[-1] if evaluated else None,
        tokens_per_second=last.get("tokens_per_second"),
        eta_seconds=last.get("eta_seconds") if state == "running" else None,
        quiet_seconds=quiet,
        reason=reason,
    )


def _waiting(submissions: list[Path]) -> tuple[str, str]:
    """State and reason of a run that has not started."""
    refused = submissions[-1] / REFUSED if submissions else None
    if refused and refused.is_file():
        return "refused", refused.read_text(errors="replace")
    return ("queued" if submissions else "new"), ""


def _last_word(folder: Path) -> dict[str, Any]:
    """How the newest attempt of a job ended, if nothing has been said of the run since."""
    journal, status = folder / "slurm" / "attempts.jsonl", folder / "status.json"
    lines = last_lines(journal)
    if not lines or (status.is_file() and status.stat().st_mtime_ns > journal.stat().st_mtime_ns):
        return {}
    return lines[-1]


def _after(ended: dict[str, Any]) -> tuple[str, str]:
    """State and reason of a run whose newest attempt has ended so."""
    kind = str(ended.get("kind"))
    state = "requeued" if ended.get("requeue") else "stopped" if kind == "paused" else kind
    return state, "" if state == "finished" else str(ended.get("why", ""))


def _mapping(path: Path) -> dict[str, Any]:
    """Of a YAML or JSON file; empty where it is not there, or not whole while it is being written."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}
