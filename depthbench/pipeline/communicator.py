"""Megatron-Core's communicator between stages, with our messages.

The schedules call it as they call their own; everything goes through `_communicate`. What differs: every receive takes
its shape from the edge that the schedule's table says comes next, never from the schedule (which knows one shape for
all) nor from the sender; one message an edge and direction, checked by its header; and nothing waits for a send but
the next one on its way.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from . import message
from .edges import Edge, Shares
from .flows import Flows, colour
from .ledger import Ledger
from .message import Label
from .order import Order
from .watchdog import Watchdog


class Handle:
    """A message in flight. Keeps the buffer alive until it is through: the schedule may free a sent tensor at once."""

    def __init__(self, work: Any, packed: Tensor, label: Label, check: int | None, watchdog: Watchdog) -> None:
        """check: the number of the pass that its header must name; None to take it unread."""
        self.work, self.packed, self.label, self.check, self.watchdog = work, packed, label, check, watchdog
        self.done = False

    def wait(self) -> None:
        """Raises MessageError if something else came."""
        if self.done:
            return
        with self.watchdog.waiting(str(self.label), self.work):
            try:
                self.work.wait()
            except RuntimeError as error:
                raise RuntimeError(f"the {self.label} failed: {error}") from error
        self.done = True
        if self.check is not None:
            message.check_header(self.packed, self.label, self.check)


@dataclass(frozen=True)
class Link:
    """What stays the same from pass to pass."""

    between: list[Edge]
    shares: Shares
    flows: Flows
    ledger: Ledger
    watchdog: Watchdog


class Communicator(P2PCommunicator):
    """For one pass over a global batch, whose messages `order` lists."""

    def __init__(
        self, link: Link, config: Any, order: Order, number: int, *, check_headers: bool, pp_group: dist.ProcessGroup
    ) -> None:
        super().__init__(pp_group, config)
        self.link, self.number, self.check_headers = link, number, check_headers
        self.stage, self.stages = pp_group.rank(), pp_group.size()
        self.to_receive = {False: deque(order.receive_forward), True: deque(order.receive_backward)}
        self.to_send = {False: deque(order.send_forward), True: deque(order.send_backward)}
        self.sending: dict[bool, Handle] = {}

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, dict[str, Handle] | None]:
        handles: dict[str, Handle] = {}
        if tensor_send_next is not None:
            handles["send_next"] = self._send(tensor_send_next, backward=False)
        if recv_prev:
            handles["recv_prev"] = self._receive(backward=False)
        if tensor_send_prev is not None:
            handles["send_prev"] = self._send(tensor_send_prev, backward=True)
        if recv_next:
            handles["recv_next"] = self._receive(backward=True)
        received = [handles[name].packed if name in handles else None for name in ("recv_prev", "recv_next")]
        if wait_on_reqs:
            for name in ("recv_prev", "recv_next"):
                if name in handles:
                    handles[name].wait()
        return received[0], received[1], None if wait_on_reqs else handles

    def _flow(self, backward: bool, sender: int) -> dist.ProcessGroup:
        return self.link.flows[backward, colour(sender, self.stages)]

    def _edge(self, label: Label) -> Edge:
        return self.link.between[label.receiver - 1]

    def _send(self, packed: Tensor, *, backward: bool) -> Handle:
        label = self.to_send[backward].popleft()
        edge = self._edge(label)
        packed = packed.detach()
        size = packed.numel() - message.header_elements(packed.dtype)
        expected = self.link.shares.of(label.microbatch).numel(*edge.tensors)
        assert size == expected, f"the {label} has {size} elements, its edge {expected}"
        if backward in self.sending:
            self.sending.pop(backward).wait()
        message.write_header(packed, label, self.number)
        destination = self.prev_rank if backward else self.next_rank
        work = dist.isend(packed, destination, group=self._flow(backward, self.stage))
        self.link.ledger.note(label.receiver, backward, len(edge.tensors), size * packed.itemsize, message.HEADER_BYTES)
        self.sending[backward] = Handle(work, packed, label, None, self.link.watchdog)
        return self.sending[backward]

    def _receive(self, *, backward: bool) -> Handle:
        label = self.to_receive[backward].popleft()
        local = self.link.shares.of(label.microbatch)
        shapes = [local.shape(spec) for spec in self._edge(label).tensors]
        packed = message.buffer(shapes, self.config.pipeline_dtype, torch.device(torch.cuda.current_device()))
        source = self.next_rank if backward else self.prev_rank
        sender = (self.stage + (1 if backward else -1)) % self.stages
        work = dist.irecv(packed, source, group=self._flow(backward, sender))
        handle = Handle(work, packed, label, self.number if self.check_headers else None, self.link.watchdog)
        packed.requires_grad_(not backward)
        return handle

    def finish(self) -> None:
        """Wait for the last sends; every message of the pass must have been sent and received."""
        for handle in self.sending.values():
            handle.wait()
        self.sending.clear()
        left: list[Label] = [label for kind in (self.to_send, self.to_receive) for q in kind.values() for label in q]
        assert not left, f"messages that were never sent or received: {', '.join(map(str, left))}"
