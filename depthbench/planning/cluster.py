"""The machine that a run is planned for: launch/clusters/NAME.yaml."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from depthbench.config.build import build, nearest
from depthbench.config.load import read_yaml
from depthbench.errors import UserError
from depthbench.paths import LAUNCH

CLUSTERS = LAUNCH / "clusters"
_SHARES = ("matmul_share", "hbm_share", "link_share")


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of GPUs. Shares are of a data sheet's figure, what is reached of it: above 0, at most 1."""

    device: str  # the vendor's name of a GPU
    gpus_per_node: int
    memory_gib: float  # of a GPU, that a process can allocate
    peak_tflops: float  # dense bfloat16
    matmul_share: float
    hbm_gb_s: float  # 1e9 bytes a second
    hbm_share: float
    nvlink_gb_s: float  # a GPU, in one direction
    network_gb_s: float  # a GPU's own adapter, in one direction
    link_share: float  # of both
    nvlink_latency_us: float  # of one collective or message inside a node
    network_latency_us: float  # of one that leaves it
    launch_us: float  # a run of one chunk, forward or backward, of one microbatch

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            latency = field.name.endswith("_us")
            if field.type is not str and not (value >= 0 if latency else value > 0):
                raise UserError(f"{field.name}={value} must be {'at least' if latency else 'above'} 0")
            if field.name in _SHARES and value > 1:
                raise UserError(f"{field.name}={value} is a share of the data sheet's figure: at most 1")

    @property
    def memory(self) -> int:
        """Bytes of a GPU that a process can allocate."""
        return int(self.memory_gib * 2**30)

    def shortage(self, needed: int) -> str:
        """What to tell of a fullest rank that needs so many bytes; nothing where a GPU has them."""
        if needed <= self.memory:
            return ""
        return f"the fullest rank needs {needed / 2**30:.1f} GiB, each {self.device} has {self.memory_gib:g}"

    @property
    def peak_flops(self) -> float:
        """FLOP/s of a GPU by its data sheet."""
        return self.peak_tflops * 1e12

    @property
    def matmul_flops(self) -> float:
        """FLOP/s that large matmuls reach."""
        return self.peak_flops * self.matmul_share

    @property
    def hbm(self) -> float:
        """Bytes a second that element-wise kernels reach."""
        return self.hbm_gb_s * 1e9 * self.hbm_share

    @property
    def nvlink(self) -> float:
        """Bytes a second that a GPU sends to others of its node."""
        return self.nvlink_gb_s * 1e9 * self.link_share

    @property
    def network(self) -> float:
        """Bytes a second that a GPU sends to another node through its own adapter."""
        return self.network_gb_s * 1e9 * self.link_share


def read_cluster_file(name: str) -> tuple[Path, dict[str, Any]]:
    """The file of the cluster called `name`, one of launch/clusters/ or a YAML file, and what it says.

    Raises UserError, with the names there are, for an unknown name, and with the file for one that cannot be read.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else CLUSTERS / f"{name}.yaml"
    if path.parent == CLUSTERS and not path.is_file():
        names = sorted(file.stem for file in CLUSTERS.glob("*.yaml"))
        raise UserError(
            f"no {name!r} in launch/clusters; nearest is {nearest(name, names)!r}; there are {', '.join(names)}"
        )
    return path, read_yaml(path)


def load_cluster(name: str) -> Cluster:
    """The machines of a cluster; how jobs are submitted to it, its file's section `slurm`, is not read here.

    Raises UserError as `read_cluster_file`, and with the file and the field for an unknown, a missing or a wrong field.
    """
    path, values = read_cluster_file(name)
    values.pop("slurm", None)
    try:
        cluster: Cluster = build(Cluster, values)
    except UserError as error:
        raise UserError(f"cluster {path}: {error}") from error
    return cluster
