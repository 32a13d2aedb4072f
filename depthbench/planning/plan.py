"""The plan of a run: what it holds, computes, sends and takes, as an object and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_run

from . import flops
from .cluster import Cluster
from .exchange import data_parallel_bytes
from .memory import CUDA, Kernels, RankMemory, assumptions, kv_cache_bytes, memory
from .parameters import Parameters, count_parameters
from .pipeline import EdgePlan, edge_plans
from .simulate import Costs, simulate_pass
from .time import StepTime, predict
from .work import chunk_work


@dataclass(frozen=True)
class Flops:
    """Floating-point operations, see `flops.py` for what is counted.

    tokens: length of the sequence that `prefill_paper` and `forward_exact` stand for.
    train_per_token: forward and backward, at the model's own sequence length.
    """

    tokens: int
    prefill_paper: float
    forward_exact: float
    train_per_token: float


@dataclass(frozen=True)
class Plan:
    """kv_cache_bytes: of one sequence of `flops.tokens`, in inference. tokens_per_step: over all ranks. steps: of the
    whole schedule. world_size: processes. memory: of a rank of each stage. bubble: idle share of the forward and
    backward pass, from FLOPs alone where no cluster is known. data_parallel_bytes: what a rank of each stage sends a
    step for gradients and weights. time: where a cluster is known.
    """

    run: str
    architecture: str
    parameters: Parameters
    flops: Flops
    kv_cache_bytes: int
    tokens_per_step: int
    steps: int
    world_size: int
    edges: list[EdgePlan]
    memory: list[RankMemory]
    memory_assumptions: list[str]
    bubble: float
    data_parallel_bytes: list[int]
    cluster: Cluster | None
    time: StepTime | None

    @property
    def total_tokens(self) -> int:
        return self.tokens_per_step * self.steps

    @property
    def cached_bytes(self) -> list[int]:
        """Of each stage's history cache."""
        return [rank.history_cache for rank in self.memory]

    @property
    def peak_memory(self) -> int:
        """Bytes of the fullest rank."""
        return max(rank.peak for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank finds room on the cluster's device, as far as that is known."""
        return not (self.cluster and self.cluster.shortage(self.peak_memory))

    def shortage(self, run: RunConfig) -> str:
        """What to tell where `run`, whose plan this is, does not fit, with the ways out; nothing where it does."""
        if not (text := self.cluster.shortage(self.peak_memory) if self.cluster else ""):
            return ""
        return (
            f"{text}: lower train.micro_batch={run.train.micro_batch}, set parallel.recompute=full or more "
            "parallel.tensor or parallel.pipeline; depthbench plan --search finds layouts that fit"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "run": self.run,
            "architecture": self.architecture,
            "parameters": {
                "total": self.parameters.total,
                "backbone": self.parameters.backbone,
                "embedding": self.parameters.embedding,
                "residual": self.parameters.residual,
            },
            "flops": {
                "tokens": self.flops.tokens,
                "prefill_paper": self.flops.prefill_paper,
                "forward_exact": self.flops.forward_exact,
                "train_per_token": self.flops.train_per_token,
            },
            "kv_cache_bytes": self.kv_cache_bytes,
            "tokens": {"per_step": self.tokens_per_step, "total": self.total_tokens},
            "steps": self.steps,
            "world_size": self.world_size,
            "edges": [_edge_dict(edge) for edge in self.edges],
            "memory": {
                "peak": self.peak_memory,
                "stages": [rank.as_dict() for rank in self.memory],
                "assumptions": self.memory_assumptions,
            },
            "cache_bytes": self.cached_bytes,
            "bubble": self.bubble,
            "data_parallel_bytes": self.data_parallel_bytes,
            "step_seconds": self.time.step if self.time else None,
            "device": self.cluster.device if self.cluster else None,
            "fits": self.fits,
            "time": self.time.as_dict() if self.time else None,
        }


def make_plan(
    run: RunConfig,
    tokens: int | None = None,
    world_size: int | None = None,
    cluster: Cluster | None = None,
    kernels: Kernels = CUDA,
) -> Plan:
    """tokens: length of the sequence whose forward FLOPs and key-value cache are counted; None means the model's
    sequence length. world_size: processes; None means one copy of the model. kernels: of the device whose memory is
    planned.

    Raises UserError if `tokens` is below 1, the residual settings cannot work at the model's shape, or the run cannot
    start on so many processes.
    """
    counted = run.model.sequence_length if tokens is None else tokens
    processes = world_size or run.parallel.tensor * run.parallel.pipeline
    check_run(run, processes)
    time = predict(run, cluster, processes) if cluster else None
    return Plan(
        run=run.name,
        architecture=run.architecture,
        parameters=count_parameters(run),
        flops=Flops(
            counted, flops.prefill_paper(run, counted), flops.forward_exact(run, counted), flops.train_per_token(run)
        ),
        kv_cache_bytes=kv_cache_bytes(run, counted),
        tokens_per_step=run.train.global_batch * run.model.sequence_length,
        steps=run.train.steps,
        world_size=processes,
        edges=edge_plans(run),
        memory=memory(run, processes, kernels),
        memory_assumptions=assumptions(run),
        bubble=time.bubble if time else bubble(run, processes),
        data_parallel_bytes=data_parallel_bytes(run, processes),
        cluster=cluster,
        time=time,
    )


def bubble(run: RunConfig, world_size: int) -> float:
    """Idle share, 0 to 1, of all stages' time in the forward and backward pass, where FLOPs are all that takes time."""
    chunks = chunk_work(run)
    free = [0.0] * (len(chunks) - 1)
    costs = Costs(
        forward=[chunk.forward.flops for chunk in chunks],
        backward=[chunk.backward.flops + chunk.recompute.flops for chunk in chunks],
        forward_edges=free,
        backward_edges=free,
    )
    return simulate_pass(run, world_size, costs).bubble


def _edge_dict(edge: EdgePlan) -> dict[str, Any]:
    """`from` and `to` are chunks in depth order."""
    plain = asdict(edge)
    return {"from": plain.pop("sender"), "to": plain.pop("receiver"), **plain}
