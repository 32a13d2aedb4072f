"""How jobs are submitted to a cluster: the section `slurm` of its file in launch/clusters/."""

import enum
import re
from dataclasses import dataclass, field

from depthbench.config.build import build
from depthbench.config.schema import positive
from depthbench.errors import UserError
from depthbench.planning.cluster import read_cluster_file

_WORD = re.compile(r"[A-Za-z0-9_.,:/@%+=\[\]&|*-]+")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def directive(name: str, value: str) -> str:
    """`value`, as it may stand in an #SBATCH line.

    Raises UserError where sbatch would read something else: it splits lines at blanks and takes quotes away.
    """
    if not _WORD.fullmatch(value):
        raise UserError(
            f"{name}={value!r} cannot stand in a line of sbatch options: letters, digits and _.,:/@%+=- only"
        )
    return value


def _seconds(time_limit: str) -> int:
    """Of sbatch's forms: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = (0, *parts, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class Runtime(enum.Enum):
    """pyxis: srun's plug-in for Enroot. apptainer: the command of that name."""

    PYXIS = "pyxis"
    APPTAINER = "apptainer"


@dataclass(frozen=True)
class Container:
    """Run folder and code are mounted at their own paths; data belongs into `mounts`."""

    runtime: Runtime
    image: str  # as the runtime takes it: a file, docker://... (apptainer), registry#name (pyxis)
    python: str = "python"  # inside the image
    mounts: list[str] = field(default_factory=list)  # SOURCE:TARGET

    def __post_init__(self) -> None:
        for mount in self.mounts:
            if mount.count(":") != 1 or "," in mount:
                raise UserError(f"slurm.container.mounts has {mount!r}: give SOURCE:TARGET, without commas")
            if self.runtime is Runtime.PYXIS and re.search(r"\s", mount):  # it writes them into lines of an fstab
                raise UserError(f"slurm.container.mounts has {mount!r}: Pyxis cannot mount a path with blanks in it")


@dataclass(frozen=True)
class SlurmSettings:
    """Where a job asks for whole nodes, with as many GPUs as the cluster's `gpus_per_node`."""

    time_limit: str = "24:00:00"
    warning_seconds: int = 600  # before the limit, when the run saves and ends; a save has to fit into it
    partition: str | None = None  # null: the cluster's default
    options: list[str] = field(default_factory=list)  # further ones of sbatch: --account=NAME, --exclusive, --mem=0
    interface: str | None = None  # network interface of NCCL's and gloo's first contact; null: they choose
    timeout_seconds: float = 1800  # until a collective operation that waits for a lost process fails
    environment: dict[str, str] = field(default_factory=dict)  # of every process
    container: Container | None = None  # null: the Python that submits, which the nodes must see

    def __post_init__(self) -> None:
        positive("slurm", warning_seconds=self.warning_seconds, timeout_seconds=self.timeout_seconds)
        if not _TIME.fullmatch(self.time_limit):
            raise UserError(f"slurm.time_limit={self.time_limit!r}: give minutes, H:M:S or D-H:M:S")
        limit = _seconds(self.time_limit)
        if 0 < limit <= self.warning_seconds:  # Slurm takes 0 for no limit
            raise UserError(
                f"slurm.time_limit={self.time_limit} (--time) is {limit} s, and the run would be told to save "
                f"slurm.warning_seconds={self.warning_seconds} s before its end: set a longer limit or a later warning"
            )
        if self.partition:
            directive("slurm.partition", self.partition)
        for option in self.options:
            if not directive("slurm.options", option).startswith("--"):
                raise UserError(f"slurm.options has {option!r}: give --name or --name=value")
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name):
                raise UserError(f"slurm.environment names a variable {name!r}: letters, digits and _ only")
            if "\0" in value:
                raise UserError(f"slurm.environment.{name}={value!r}: no variable can hold the character NUL")


def load_slurm(name: str) -> SlurmSettings:
    """Of the cluster called `name`.

    Raises UserError as `read_cluster_file`, and with the file and the field for a file whose section is missing or has
    an unknown or a wrong field.
    """
    path, values = read_cluster_file(name)
    section = values.get("slurm")
    if not isinstance(section, dict):
        raise UserError(f"cluster {path} does not say how jobs are submitted: add a section slurm (docs/slurm.md)")
    try:
        settings: SlurmSettings = build(SlurmSettings, section, "slurm")
    except UserError as error:
        raise UserError(f"cluster {path}: {error}") from error
    return settings
