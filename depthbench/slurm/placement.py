"""Whether a run's layout suits a cluster's nodes: what `depthbench submit` refuses before anything is queued.

Ranks are numbered tensor parallelism first, then data, then pipeline, and Slurm's nodes take them in that order: so the
ranks that share matmuls lie inside a node, and it is stages that lie on different ones.
"""

import subprocess

from depthbench.config.schema import RunConfig
from depthbench.errors import UserError
from depthbench.planning.cluster import Cluster
from depthbench.planning.plan import Plan, make_plan


def least_nodes(run: RunConfig, cluster: Cluster) -> int:
    """For one copy of the model."""
    return -(-run.parallel.tensor * run.parallel.pipeline // cluster.gpus_per_node)


def checked_plan(run: RunConfig, cluster: Cluster, nodes: int) -> Plan:
    """The run's plan on so many nodes.

    Raises UserError, with the numbers, where tensor parallelism would leave a node, the layout does not divide the
    processes, or the fullest rank needs more memory than a GPU has.
    """
    tensor, each = run.parallel.tensor, cluster.gpus_per_node
    if nodes < 1:
        raise UserError(f"--nodes={nodes} must be at least 1")
    if each % tensor:
        problem = (
            f"is more than the {each} GPUs of a node" if tensor > each else f"does not divide a node's {each} GPUs"
        )
        fitting = ", ".join(str(size) for size in range(1, each + 1) if each % size == 0)
        raise UserError(
            f"parallel.tensor={tensor} {problem}, and ranks that share matmuls have to lie inside one; set it to one "
            f"of {fitting}"
        )
    plan = make_plan(run, world_size=nodes * each, cluster=cluster)
    if shortage := plan.shortage(run):
        raise UserError(shortage)
    return plan


def partition_nodes(partition: str | None) -> tuple[str, int]:
    """Name and number of nodes of a partition, or of the default one.

    Raises UserError where Slurm is not installed, does not answer, or has no such partition.
    """
    try:
        found = subprocess.run(
            ["sinfo", "--noheader", "--format=%P %D"], capture_output=True, text=True, check=True, timeout=60
        )
    except FileNotFoundError:
        raise UserError("sinfo is not on PATH: submit where Slurm is installed, or look with --dry-run") from None
    except subprocess.CalledProcessError as error:
        raise UserError(f"sinfo failed, so Slurm cannot be asked for its partitions: {error.stderr}") from error
    except subprocess.TimeoutExpired:
        raise UserError("sinfo has not answered for 60 s: Slurm's controller may be down") from None
    counts = {name: int(count) for name, count in (line.split() for line in found.stdout.splitlines())}
    for name, count in counts.items():
        if name.rstrip("*") == partition or (partition is None and name.endswith("*")):
            return name.rstrip("*"), count
    there = ", ".join(name.rstrip("*") for name in counts) or "none"
    wanted = f"no partition {partition!r}" if partition else "no default partition: set slurm.partition"
    raise UserError(f"Slurm has {wanted}; there are {there}")


def check_nodes(nodes: int, partition: str | None) -> None:
    """Raise UserError if the partition has fewer nodes."""
    name, there = partition_nodes(partition)
    if nodes > there:
        raise UserError(f"{nodes} nodes asked for, partition {name} has {there}: set --nodes={there} or fewer")
