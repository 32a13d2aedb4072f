"""Which links a run's ranks use, from where its processes lie.

Megatron-Core numbers ranks with tensor parallelism fastest, then data, then pipeline ("tp-cp-ep-dp-pp"): rank =
(stage * D + replica) * T + place, for T tensor-parallel ranks and D replicas. Nodes hold consecutive ranks.
"""

from dataclasses import dataclass

from depthbench.config.schema import RunConfig
from depthbench.config.validate import data_parallel

from .cluster import Cluster


@dataclass(frozen=True)
class Link:
    """rate: bytes a second that a rank sends. latency: seconds a call."""

    rate: float
    latency: float

    def seconds(self, size: float, calls: float = 1) -> float:
        """To send `size` bytes in `calls` calls."""
        return size / self.rate + calls * self.latency


class Links:
    """Of a run on `world_size` processes of a cluster. Raises UserError where the layout does not divide them."""

    def __init__(self, run: RunConfig, cluster: Cluster, world_size: int) -> None:
        self.cluster, self.node = cluster, cluster.gpus_per_node
        self.tensor_ranks, self.stages = run.parallel.tensor, run.parallel.pipeline
        self.replicas = data_parallel(run, world_size)
        self.inside = Link(cluster.nvlink, cluster.nvlink_latency_us * 1e-6)
        self.outside = Link(cluster.network, cluster.network_latency_us * 1e-6)

    @property
    def tensor(self) -> Link:
        return self.inside if self.node % self.tensor_ranks == 0 else self.outside

    def between(self, sender: int, receiver: int) -> Link:
        """Of two stages; where some replicas' ranks share a node and others' do not, the slower."""
        size = self.tensor_ranks * self.replicas
        pairs = ((sender * size + rank, receiver * size + rank) for rank in range(size))
        return self.inside if all(a // self.node == b // self.node for a, b in pairs) else self.outside

    @property
    def data(self) -> Link:
        """Of a data-parallel group's ring. Its ranks in one node share their adapters: what leaves the node goes
        through all of them."""
        size = self.tensor_ranks * self.replicas
        groups = (range(stage * size, (stage + 1) * size) for stage in range(self.stages))
        if all(group[0] // self.node == group[-1] // self.node for group in groups):
            return self.inside
        adapters = max(1, min(self.replicas, self.node // self.tensor_ranks))
        return Link(min(self.inside.rate, adapters * self.outside.rate), self.outside.latency)
