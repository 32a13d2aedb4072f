"""The job script: sbatch's options, the job's values, and launch/slurm/batch.sh, which is the same for all.

No setting of the run stands in it: the processes read those from run.yaml beside it. What does, paths and the cluster's
environment, is quoted, and comes after the first command, where sbatch no longer looks for options.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from depthbench.errors import UserError
from depthbench.parallel.startup import TIMEOUT_VARIABLE
from depthbench.paths import LAUNCH

from .settings import Runtime, SlurmSettings, directive

TEMPLATES = LAUNCH / "slurm"
NO_LOG = (TEMPLATES / "no_log.sh").read_text()  # how a script speaks that has no log yet

# what batch.sh exports for node.sh
_EXPORTED = (
    "DEPTHBENCH_ATTEMPT",
    *("submission", "logs", "rank_python", "processes_per_node", "master_addr", "master_port"),
)


@dataclass(frozen=True)
class Job:
    """submission: its folder. python: the interpreter that submits. last_step: the last one to
    train now. steps: of the whole run."""

    name: str
    run_folder: Path
    submission: Path
    python: str
    nodes: int
    gpus_per_node: int
    last_step: int
    steps: int
    max_requeues: int


def render(job: Job, settings: SlurmSettings) -> str:
    """The text of submit.sbatch.

    Raises UserError for a path that the container's runtime could not be told.
    """
    lines = header(job, settings)
    lines += [f"{name}={shlex.quote(str(value))}" for name, value in _values(job, settings).items()]
    for name, words in _container(job, settings).items():
        lines.append(f"{name}=({' '.join(shlex.quote(word) for word in words)})")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in _environment(settings).items()]
    return "\n".join(lines) + "\n\n" + NO_LOG + (TEMPLATES / "batch.sh").read_text()


def header(job: Job, settings: SlurmSettings, *more: str) -> list[str]:
    """What sbatch reads of a script: the first lines, up to an empty one. more: further options."""
    return ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*_options(job, settings), *more]), ""]


def _options(job: Job, settings: SlurmSettings) -> list[str]:
    return [
        f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '_', job.name)[:100]}",
        *([f"--partition={settings.partition}"] if settings.partition else []),
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--gpus-per-node={job.gpus_per_node}",
        f"--time={directive('--time', settings.time_limit)}",
        f"--signal=B:USR1@{settings.warning_seconds}",
        "--requeue",
        "--open-mode=append",
        "--output=/dev/null",  # the script writes its own log, whatever characters the path has
        *settings.options,
    ]


def _values(job: Job, settings: SlurmSettings) -> dict[str, str | int | Path]:
    return {
        "run_folder": job.run_folder,
        "submission": job.submission,
        "host_python": job.python,
        "rank_python": settings.container.python if settings.container else job.python,
        "processes_per_node": job.gpus_per_node,
        "last_step": job.last_step,
        "steps": job.steps,
        "max_requeues": job.max_requeues,
    }


def _environment(settings: SlurmSettings) -> dict[str, str]:
    interface = settings.interface
    return {
        TIMEOUT_VARIABLE: f"{settings.timeout_seconds:g}",
        **({"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}),
        **settings.environment,
    }


def _container(job: Job, settings: SlurmSettings) -> dict[str, Sequence[str]]:
    """srun_options: further ones. inside: the command that runs another in the container."""
    container = settings.container
    if container is None:
        return {"srun_options": [], "inside": []}
    folder = str(job.run_folder)
    if ":" in folder or "," in folder:
        raise UserError(f"run folder {folder!r}: a container cannot mount a path with : or , in it; set run_dir=FOLDER")
    mounts = [f"{folder}:{folder}", *container.mounts]
    if container.runtime is Runtime.PYXIS:
        if re.search(r"\s", folder):
            raise UserError(f"run folder {folder!r}: Pyxis cannot mount a path with blanks in it; set run_dir=FOLDER")
        ours = [*_environment(settings), *_EXPORTED]  # otherwise what the image sets goes first
        return {
            "srun_options": [
                f"--container-image={container.image}",
                f"--container-mounts={','.join(mounts)}",
                f"--container-env={','.join(ours)}",
            ],
            "inside": [],
        }
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return {"srun_options": [], "inside": ["apptainer", "exec", "--nv", *binds, container.image]}
