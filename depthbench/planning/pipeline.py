"""What crosses every edge of a run's pipeline, and what its stages keep for later chunks."""

from dataclasses import dataclass

from depthbench.config.schema import Precision, RunConfig
from depthbench.config.validate import layout_of, local_share, microbatch_group, microbatches, residual_of
from depthbench.pipeline.edges import Edge, Local, edges, retentions
from depthbench.pipeline.order import runs

ELEMENT_BYTES = {Precision.BF16: 2, Precision.REFERENCE: 2, Precision.FP32: 4, Precision.FP64: 8}
"""Of weights, activations and the depth state."""
STATE_BYTES = {**ELEMENT_BYTES, Precision.BF16: 4}
"""Of gradients, moments and master weights."""


@dataclass(frozen=True)
class EdgePlan:
    """One message, of one microbatch and rank of the tensor-parallel group. sender, receiver: chunks; a backward
    message goes from the later chunk to the earlier one. bytes: of its tensors, without the 16 of its header.

    bytes_without_cache: were all history sent again. bytes_paper: by the scheme of the AttnRes paper, which sends what
    the receiving stage has not received before, even if it made it itself.
    """

    sender: int
    receiver: int
    sender_stage: int
    receiver_stage: int
    direction: str
    history_tensors: int
    live_tensors: int
    bytes: int
    bytes_without_cache: int
    bytes_paper: int


def edge_plans(run: RunConfig) -> list[EdgePlan]:
    """Forward edges in depth order, then backward ones in reverse; none for a model that is not cut into stages."""
    layout, local, size = layout_of(run), local_share(run), ELEMENT_BYTES[run.train.precision]

    def plan(edge: Edge, sender: int, receiver: int) -> EdgePlan:
        return EdgePlan(
            sender=sender,
            receiver=receiver,
            sender_stage=sender % layout.num_stages,
            receiver_stage=receiver % layout.num_stages,
            direction="forward" if sender < receiver else "backward",
            history_tensors=len(edge.history),
            live_tensors=len(edge.live),
            bytes=size * local.numel(*edge.tensors),
            bytes_without_cache=size * local.numel(*edge.live, *edge.whole),
            bytes_paper=size * local.numel(*edge.live, *edge.paper),
        )

    between = edges(residual_of(run), layout, run.pipeline.history_cache)
    forward = [plan(edge, edge.sender, edge.receiver) for edge in between]
    return forward + [plan(edge, edge.receiver, edge.sender) for edge in reversed(between)]


def cached_bytes(run: RunConfig, world_size: int) -> list[int]:
    """The most that each stage's history cache holds at once in a step on `world_size` processes."""
    return cache_peaks(run, local_share(run), microbatches(run, world_size))


def cache_peaks(run: RunConfig, local: Local, count: int) -> list[int]:
    """The most that each stage's history cache holds at once while `count` microbatches, of which a rank holds `local`,
    go forward."""
    layout, element = layout_of(run), ELEMENT_BYTES[run.train.precision]
    residual, cached = residual_of(run), run.pipeline.history_cache
    states = [residual.state_at(layout.sublayer(chunk)) for chunk in range(layout.num_chunks)]
    sizes = {spec.name: element * local.numel(spec) for state in states for spec in state.history}
    sent = {edge.receiver: {spec.name for spec in edge.history} for edge in edges(residual, layout, cached)}
    keeping = retentions(residual, layout, cached)
    peaks = []
    for stage in range(layout.num_stages):
        held = peak = 0
        for chunk, _ in runs(layout, stage, count, microbatch_group(run)):
            arrived = keeping[chunk].kept & sent.get(chunk, set())
            made = keeping[chunk].kept - arrived
            with_arrived = held + sum(sizes[name] for name in arrived)
            held = with_arrived - sum(sizes[name] for name in keeping[chunk].last) + sum(sizes[name] for name in made)
            peak = max(peak, with_arrived, held)
        peaks.append(peak)
    return peaks
