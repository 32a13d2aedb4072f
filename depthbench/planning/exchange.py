"""What a step does outside the forward and backward pass: gradients summed over replicas, weights updated and gathered.

Of each the exposed seconds are told: those that the step takes longer for it. A stage s > 0 ends its pass before the
first one does, and begins it later; in that time it reduces and gathers for nothing. With overlap all buckets but the
last one reduced, and the first one gathered, go behind one microbatch's backward and forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from depthbench.config.schema import Precision, RunConfig
from depthbench.config.validate import data_parallel, layout_of

from .cluster import Cluster
from .links import Links
from .parameters import rank_weights
from .pipeline import ELEMENT_BYTES, STATE_BYTES
from .simulate import Costs

_BUCKET, _BUCKET_A_REPLICA = 40_000_000, 1_000_000  # Megatron-Core's default: parameters a bucket, at least
_UPDATE_PASSES = 10  # over a weight's state: norm 1, clipping 2, AdamW 7 (gradient, weight, moments in; three out)


@dataclass(frozen=True)
class Exposed:
    """Seconds a step. gradients: reduction; update: norm, clipping and AdamW; gather: of updated weights."""

    gradients: float
    update: float
    gather: float


def stage_parameters(run: RunConfig) -> list[int]:
    """Weights that a rank of each stage holds."""
    layout = layout_of(run)
    return [
        sum(rank_weights(run, *layout.span(chunk)).total for chunk in layout.chunks_of(stage))
        for stage in range(layout.num_stages)
    ]


def data_parallel_bytes(run: RunConfig, world_size: int) -> list[int]:
    """Bytes that a rank of each stage sends a step, in rings: gradients reduced, and with the distributed optimizer
    scattered, then weights gathered; without it gradients twice.

    Raises UserError where the layout does not divide the processes.
    """
    replicas, precision = data_parallel(run, world_size), run.train.precision
    state, element = STATE_BYTES[precision], ELEMENT_BYTES[precision]
    each = state + (element if run.parallel.distributed_optimizer else state)
    return [round(held * each * (replicas - 1) / replicas) for held in stage_parameters(run)]


def exposed(run: RunConfig, cluster: Cluster, links: Links, costs: Costs) -> Exposed:
    """The slowest stage's seconds of each."""
    layout, parallel, replicas = layout_of(run), run.parallel, links.replicas
    state, element = STATE_BYTES[run.train.precision], ELEMENT_BYTES[run.train.precision]
    held, share = stage_parameters(run), (replicas - 1) / replicas
    bucket = parallel.bucket_size or max(_BUCKET, _BUCKET_A_REPLICA * replicas)

    def uncovered(size: float, behind: Sequence[float], overlap: bool) -> Callable[[int], float]:
        """size: bytes sent a weight. behind: seconds of the chunks' runs that may hide it."""

        def seconds(stage: int) -> float:
            parts = -(-held[stage] // bucket) if overlap and stage == 0 else layout.chunks_per_stage
            whole = links.data.seconds(held[stage] * size * share, parts if replicas > 1 else 0)
            window = sum(behind[chunk] for chunk in layout.chunks_of(stage)) if overlap else 0.0
            left = max(whole - window, whole / parts if overlap else whole)
            return max(0.0, left - sum(behind[:stage]))

        return seconds

    stages, sharded = range(layout.num_stages), parallel.distributed_optimizer
    reduced = uncovered((1 if sharded else 2) * state, costs.backward, parallel.overlap_grad_reduce)
    gathered = uncovered(element if sharded else 0, costs.forward, parallel.overlap_param_gather)
    passes = _UPDATE_PASSES * state + (state + element if run.train.precision is Precision.BF16 else 0)
    owned = passes / (replicas if sharded else 1) + state  # and all gradients are set to zero
    return Exposed(
        gradients=max(map(reduced, stages)) if replicas > 1 else 0.0,
        update=max(held) * owned / cluster.hbm,
        gather=max(map(gathered, stages)) if replicas > 1 and sharded else 0.0,
    )
