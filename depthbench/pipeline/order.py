"""In which order a stage's messages come and go, from Megatron-Core's own schedule table.

Between two stages messages of one direction keep their order, so that the k-th one received is the k-th one sent, and
both ends can tell from the table which it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.pipeline_parallel.schedules import get_schedule_table

from .layout import Layout
from .message import Label


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
    table = get_schedule_table(num_microbatches, layout.chunks_per_stage, group)

    def run_by(stage: int, backward: bool) -> Iterator[tuple[int, int]]:
        """(chunk, microbatch) in the order in which a stage runs them."""
        for microbatch, virtual in table:
            yield (layout.chunks_per_stage - 1 - virtual if backward else virtual) * stages + stage, microbatch

    def forward(stage: int) -> list[Label]:
        return [Label(False, chunk + 1, microbatch) for chunk, microbatch in run_by(stage, False) if chunk != last]

    def backward(stage: int) -> list[Label]:
        if forward_only:
            return []
        return [Label(True, chunk, microbatch) for chunk, microbatch in run_by(stage, True) if chunk != 0]

    return Order(
        receive_forward=forward((stage - 1) % stages),
        send_forward=forward(stage),
        receive_backward=backward((stage + 1) % stages),
        send_backward=backward(stage),
    )
