"""Many runs as one job array: every combination of some settings, configs/sweeps/NAME.yaml.

Each run has its own folder and job script, as if it had been submitted alone. The array's script starts the one of its
task, which then requeues and resumes that task and no other.
"""

import itertools
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from depthbench.config.build import build
from depthbench.config.load import group_file, read_yaml
from depthbench.config.schema import positive
from depthbench.errors import UserError

from .script import NO_LOG, Job, header
from .settings import SlurmSettings


@dataclass(frozen=True)
class Sweep:
    """grid: for each override's key, a group or a dotted key, its values."""

    grid: dict[str, list[Any]]
    limit: int  # runs at a time

    def __post_init__(self) -> None:
        positive("sweep", limit=self.limit)
        if not self.grid or not all(self.grid.values()):
            raise UserError("sweep.grid must name at least one key, and for each key at least one value")


def load_sweep(name: str) -> tuple[str, Sweep]:
    """Name and content of a sweep: a name under configs/sweeps/, or a YAML file.

    Raises UserError, with the file, for one that cannot be read or has an unknown, a missing or a wrong field.
    """
    path = group_file("sweeps", name)
    try:
        sweep: Sweep = build(Sweep, read_yaml(path))
    except UserError as error:
        raise UserError(f"sweep {path}: {error}") from error
    return path.stem, sweep


def members(sweep: Sweep) -> dict[str, list[str]]:
    """Overrides of each run, by a name for its folder: the values, in the grid's order."""
    found: dict[str, list[str]] = {}
    for values in itertools.product(*sweep.grid.values()):
        words = [f"{key}={_text(value)}" for key, value in zip(sweep.grid, values, strict=True)]
        name = "-".join(re.sub(r"[^A-Za-z0-9_.]", "_", _text(value)) for value in values)
        if name in found:
            raise UserError(f"sweep.grid: {found[name]} and {words} would share the run folder {name}")
        found[name] = words
    return found


def _text(value: Any) -> str:
    """A value as an override says it."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")


def assignment(key: str, text: str) -> str:
    """The override that sets `key` to `text`, whatever characters it has."""
    return f"{key}={yaml.safe_dump(text, default_style=chr(34), width=10**6).rstrip()}"


def array_script(name: str, jobs: Sequence[Job], settings: SlurmSettings, limit: int) -> str:
    """name: the array's. jobs: the runs', which all ask for the same nodes."""
    lines = header(replace(jobs[0], name=name), settings, f"--array=0-{len(jobs) - 1}%{limit}")
    runs = "\n".join(f"    {shlex.quote(str(job.submission / 'submit.sbatch'))}" for job in jobs)
    start = """\
script=${runs[$SLURM_ARRAY_TASK_ID]}
[ -r "$script" ] || no_log "cannot read $script"
exec bash -- "$script"
"""
    return "\n".join([*lines, f"runs=(\n{runs}\n)", "", NO_LOG + start])
