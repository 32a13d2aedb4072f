"""How long a step of a run takes on a cluster, from counted work and data-sheet rates. A model, not a measurement: what
it assumes it lists."""

from dataclasses import dataclass
from typing import Any

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, microbatches

from . import flops
from .cluster import Cluster
from .exchange import Exposed, exposed
from .links import Links
from .pipeline import EdgePlan, edge_plans
from .simulate import Costs, Simulation, simulate_pass
from .work import ChunkWork, Work, chunk_work


@dataclass(frozen=True)
class Counted:
    """What a layout does, wherever it runs: of each chunk and edge, for one microbatch."""

    chunks: list[ChunkWork]
    edges: list[EdgePlan]


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step unless a name says otherwise.

    step = forward_backward + gradients + update + gather, of which the last three are what is exposed.

    matmul, memory, tensor, launch: of the stage that computes most: multiplying, element-wise work, exchanges in the
    tensor-parallel group, starting chunks; `recompute` of them is repeated work. bubble: idle share of all stages' time
    in forward_backward. messages: the most that a stage waits for messages on their way. mfu: training FLOPs over the
    data sheet's peak. gpu_hours: of all steps of the run.
    """

    step: float
    forward_backward: float
    gradients: float
    update: float
    gather: float
    matmul: float
    memory: float
    tensor: float
    launch: float
    recompute: float
    messages: float
    bubble: float
    tokens_per_second: float
    mfu: float
    gpu_hours: float
    assumptions: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dict(vars(self))


class StepModel:
    """One run on `world_size` GPUs of a cluster.

    Raises UserError where the layout does not divide them, or the residual settings cannot work at the model's shape.
    The batch must divide too: `depthbench.config.validate.check_run`.
    """

    def __init__(self, run: RunConfig, cluster: Cluster, world_size: int, work: Counted | None = None) -> None:
        """work: where it is known already."""
        self.run, self.cluster, self.world_size = run, cluster, world_size
        self.work = work or Counted(chunk_work(run), edge_plans(run))
        self.layout, self.links = layout_of(run), Links(run, cluster, world_size)
        self.microbatches = microbatches(run, world_size)
        forward, backward = (
            [self._message(e) for e in self.work.edges if e.direction == d] for d in ("forward", "backward")
        )
        self.costs = Costs(
            forward=[self.seconds(chunk.forward) for chunk in self.work.chunks],
            backward=[self.seconds(chunk.backward, chunk.recompute) for chunk in self.work.chunks],
            forward_edges=forward,
            backward_edges=backward[::-1],  # planned from the last edge on
        )

    def _message(self, edge: EdgePlan) -> float:
        return self.links.between(edge.sender_stage, edge.receiver_stage).seconds(edge.bytes)

    def split(self, *work: Work) -> list[float]:
        """Seconds of matmuls, of element-wise work and of exchanges."""
        all_of_it = sum(work, Work())
        exchanges = self.links.tensor.seconds(all_of_it.exchanged, all_of_it.collectives)
        return [all_of_it.flops / self.cluster.matmul_flops, all_of_it.traffic / self.cluster.hbm, exchanges]

    def seconds(self, *work: Work) -> float:
        """Of one run of a chunk."""
        return sum(self.split(*work)) + self.cluster.launch_us * 1e-6

    @property
    def exposed(self) -> Exposed:
        return exposed(self.run, self.cluster, self.links, self.costs)

    def estimate(self) -> float:
        """Seconds of a step without a simulation: the busiest stage's runs, with their messages unless these overlap,
        and the pipeline's filling and draining. Near enough to tell which layouts to simulate."""
        costs, hidden = self.costs, self.run.pipeline.overlap_p2p
        messages = [a + b for a, b in zip(costs.forward_edges, costs.backward_edges, strict=True)]
        runs = [a + b for a, b in zip(costs.forward, costs.backward, strict=True)]
        stages, outside = range(self.layout.num_stages), self.exposed
        steady = [0.0 if hidden else message for message in (*messages, 0.0)]
        busiest = max(sum(runs[c] + steady[c] for c in self.layout.chunks_of(stage)) for stage in stages)
        filling = sum(runs[: len(stages) - 1]) + sum(messages[: len(stages) - 1])
        return self.microbatches * busiest + filling + outside.gradients + outside.update + outside.gather

    def simulated(self) -> Simulation:
        """The forward and backward pass of one step."""
        return simulate_pass(self.run, self.world_size, self.costs)

    def predict(self) -> StepTime:
        """The step, with its pass simulated."""
        run, outside, found = self.run, self.exposed, self.simulated()
        step = found.seconds + outside.gradients + outside.update + outside.gather
        busiest = found.busy.index(max(found.busy))
        chunks = [self.work.chunks[chunk] for chunk in self.layout.chunks_of(busiest)]
        matmul, memory, tensor = self.split(*(w for c in chunks for w in (c.forward, c.backward, c.recompute)))
        per_second = run.train.global_batch * run.model.sequence_length / step
        peak = self.world_size * self.cluster.peak_flops
        return StepTime(
            step=step,
            forward_backward=found.seconds,
            gradients=outside.gradients,
            update=outside.update,
            gather=outside.gather,
            matmul=self.microbatches * matmul,
            memory=self.microbatches * memory,
            tensor=self.microbatches * tensor,
            launch=self.microbatches * 2 * len(chunks) * self.cluster.launch_us * 1e-6,
            recompute=self.microbatches * sum(self.split(*(chunk.recompute for chunk in chunks))),
            messages=max(found.exposed),
            bubble=found.bubble,
            tokens_per_second=per_second,
            mfu=flops.train_per_token(run) * per_second / peak,
            gpu_hours=step * run.train.steps * self.world_size / 3600,
            assumptions=assumptions(self.cluster),
        )


def predict(run: RunConfig, cluster: Cluster, world_size: int) -> StepTime:
    """One training step of `run` on `world_size` GPUs.

    Raises UserError where the layout does not divide the GPUs, or the residual settings cannot work at this shape.
    """
    return StepModel(run, cluster, world_size).predict()


def assumptions(cluster: Cluster) -> list[str]:
    """What a prediction takes for granted."""
    return [
        f"matmuls reach {cluster.matmul_share:.0%} of the {cluster.device}'s peak at every size, attention as well",
        f"other kernels reach {cluster.hbm_share:.0%} of its memory's bandwidth, and make no temporary tensors but "
        "those of RoPE and the loss",
        "each sublayer reads its whole depth state twice, also where several share a pass, and writes what is new once",
        f"links reach {cluster.link_share:.0%} of their rate; messages take it from nobody else",
        "exchanges in a tensor-parallel group hide behind nothing",
        f"a run of a chunk costs {cluster.launch_us:g} microseconds beyond its kernels",
        "ranks lie on nodes in order: tensor parallelism fastest, then data, then pipeline; every GPU has an adapter",
        "loading data, evaluation, checkpoints, logging and stragglers cost nothing",
    ]
