"""In which order a stage runs its chunks and its messages come and go: Megatron-Core's schedules, written down.

Between two stages messages of one direction keep their order, so that the k-th one received is the k-th one sent, and
both ends can tell from this which it is. (That the table is Megatron-Core's own, a test shows; without it a plan needs
no Megatron-Core.)
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .layout import Layout
from .message import Label


def schedule_table(num_microbatches: int, chunks_per_stage: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, virtual chunk) in the order in which each stage runs them forward: groups of microbatches, each
    through one chunk after the other. Backward goes by the same table with the chunks reversed."""
    return [
        (microbatch, virtual)
        for first in range(0, num_microbatches, group)
        for virtual in range(chunks_per_stage)
        for microbatch in range(first, min(first + group, num_microbatches))
    ]


def runs(
    layout: Layout, stage: int, num_microbatches: int, group: int, *, backward: bool = False
) -> Iterator[tuple[int, int]]:
    """(chunk, microbatch) in the order in which a stage runs them in one direction."""
    for microbatch, virtual in schedule_table(num_microbatches, layout.chunks_per_stage, group):
        yield (layout.chunks_per_stage - 1 - virtual if backward else virtual) * layout.num_stages + stage, microbatch


@dataclass(frozen=True)
class Order:
    """Labels of a stage's messages in one pass over a global batch, in order; no backward ones if forward_only."""

    receive_forward: list[Label]
    send_forward: list[Label]
    receive_backward: list[Label]
    send_backward: list[Label]


def order(layout: Layout, stage: int, num_microbatches: int, group: int, forward_only: bool) -> Order:
    """group: consecutive microbatches that a stage runs through one chunk before the next chunk."""
    stages, last = layout.num_stages, layout.num_chunks - 1

    def forward(stage: int) -> list[Label]:
        ran = runs(layout, stage, num_microbatches, group)
        return [Label(False, chunk + 1, microbatch) for chunk, microbatch in ran if chunk != last]

    def backward(stage: int) -> list[Label]:
        ran = () if forward_only else runs(layout, stage, num_microbatches, group, backward=True)
        return [Label(True, chunk, microbatch) for chunk, microbatch in ran if chunk != 0]

    return Order(
        receive_forward=forward((stage - 1) % stages),
        send_forward=forward(stage),
        receive_backward=backward((stage + 1) % stages),
        send_backward=backward(stage),
    )
