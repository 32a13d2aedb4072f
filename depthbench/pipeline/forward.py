"""Microbatches through a pipeline, forward alone and without Megatron-Core's schedules.

Those want whole groups of microbatches; a token that is decoded is a single one. A stage runs its chunks in the order
of `order.runs`, so messages and the history cache are as in training. A stage has one message on its way at a time and
receives what is due: in groups of twice as many microbatches as stages and more, all would wait for each other to
receive. Here groups are of as many as there are stages.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from .edges import Local
from .order import runs
from .transport import Transport


def run_forward(
    transport: Transport, shares: Sequence[Local], run: Callable[[int, int, Tensor | None], Tensor | None]
) -> None:
    """A collective call of a pipeline's stages. shares: what a rank holds of each microbatch.

    run(virtual, microbatch, arrived): this stage's `virtual`-th chunk, with the message that came for it (none for the
    model's first one); returns the message to the next (none of the last one).
    """
    layout, group = transport.layout, transport.options.group
    assert group == layout.num_stages, f"groups of {group} through {layout.num_stages} stages may never end"
    last = layout.num_chunks - 1
    with transport.communicate(len(shares), forward_only=True, own=shares) as communicator:
        for chunk, microbatch in runs(layout, transport.stage, len(shares), group):
            # no variable holds a message; the shape is a stand-in: the edge knows better
            message = run(
                chunk // layout.num_stages, microbatch, communicator.recv_forward((1,), is_first_stage=chunk == 0)
            )
            communicator.send_forward(message, is_last_stage=chunk == last)
            del message
