"""What each stage of a pipeline does in one pass over a global batch, and when it waits: Megatron-Core's schedules with
our communicator, written down.

A send waits for the one before it in its direction and for nothing else. A receive that does not overlap is waited for
at once, together with the one posted beside it: a stage of the interleaved schedule then has its next input *and* its
next gradient before it computes either. (That this is what Megatron-Core 0.16's schedules do, a test shows; those of
0.19 differ with overlap, where a stage waits for its next gradient before its next input. A plan needs neither.)
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from depthbench.pipeline.layout import Layout
from depthbench.pipeline.message import Label
from depthbench.pipeline.order import Order, order, runs


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a chunk forward or backward on one microbatch."""

    chunk: int
    microbatch: int
    backward: bool


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send a message, and go on."""

    label: Label


@dataclass(frozen=True, slots=True)
class Receive:
    """Be ready to receive a message, and go on."""

    label: Label


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on only once a message that this stage sends or receives is through."""

    label: Label


Action = Compute | Send | Receive | Wait


def schedule(
    layout: Layout, num_microbatches: int, group: int, *, overlap_p2p: bool = False, forward_only: bool = False
) -> list[list[Action]]:
    """Each stage's actions in order. group: consecutive microbatches that a stage runs through one chunk before the
    next chunk; that and overlap_p2p matter only with several chunks a stage."""
    stages = []
    for stage in range(layout.num_stages):
        script = _Script(order(layout, stage, num_microbatches, group, forward_only))
        ran: Iterable[tuple[int, int]] = runs(layout, stage, num_microbatches, group)
        forward = [Compute(chunk, microbatch, False) for chunk, microbatch in ran]
        ran = () if forward_only else runs(layout, stage, num_microbatches, group, backward=True)
        backward = [Compute(chunk, microbatch, True) for chunk, microbatch in ran]
        if layout.chunks_per_stage > 1:
            _interleaved(layout, stage, script, forward, backward, group, overlap_p2p)
        else:
            _one_chunk(layout, stage, script, forward, backward)
        script.finish()
        stages.append(script.actions)
    return stages


def warmup_runs(layout: Layout, stage: int, group: int) -> int:
    """How many forward runs of a stage come before the first backward one, where there are as many. group: as above."""
    behind, chunks = layout.num_stages - stage - 1, layout.chunks_per_stage
    return 2 * behind + (chunks - 1) * group if chunks > 1 else behind


@dataclass
class _Script:
    """The communicator's side: `depthbench.pipeline.communicator` without tensors.

    sending: the last message sent in each direction. open: messages that are not waited for yet.
    """

    lists: Order
    actions: list[Action] = field(default_factory=list)
    sending: dict[bool, Label] = field(default_factory=dict)
    open: set[Label] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.to_receive = {False: deque(self.lists.receive_forward), True: deque(self.lists.receive_backward)}
        self.to_send = {False: deque(self.lists.send_forward), True: deque(self.lists.send_backward)}

    def send(self, *, backward: bool) -> Label:
        if backward in self.sending:
            self.wait(self.sending.pop(backward))
        label = self.sending[backward] = self.to_send[backward].popleft()
        self.open.add(label)
        self.actions.append(Send(label))
        return label

    def receive(self, *, backward: bool) -> Label:
        label = self.to_receive[backward].popleft()
        self.open.add(label)
        self.actions.append(Receive(label))
        return label

    def wait(self, label: Label | None) -> None:
        if label in self.open:
            self.open.remove(label)
            self.actions.append(Wait(label))

    def exchange(
        self, *, send_next: bool = False, recv_prev: bool = False, send_prev: bool = False, recv_next: bool = False
    ) -> None:
        """All at once, then wait for what comes."""
        if send_next:
            self.send(backward=False)
        arriving = [self.receive(backward=False)] if recv_prev else []
        if send_prev:
            self.send(backward=True)
        arriving += [self.receive(backward=True)] if recv_next else []
        for label in arriving:
            self.wait(label)

    def finish(self) -> None:
        """Wait for the last sends."""
        for label in self.sending.values():
            self.wait(label)
        left = [*self.to_send.values(), *self.to_receive.values()]
        assert not any(left), f"messages that were never sent or received: {left}"


@dataclass
class _Overlapped:
    """One direction's messages in the steady state with overlap: receives waited for when a chunk is about to run,
    the last send after the next one has started."""

    script: _Script
    backward: bool
    arriving: deque[Label] = field(default_factory=deque)
    sent: Label | None = None

    def wait(self) -> None:
        if self.arriving:
            self.script.wait(self.arriving.popleft())

    def start(self, *, send: bool, receive: bool) -> None:
        before = self.sent
        self.sent = self.script.send(backward=self.backward) if send else None
        if receive:
            self.arriving.append(self.script.receive(backward=self.backward))
        self.script.wait(before)


def _one_chunk(layout: Layout, stage: int, script: _Script, forward: list[Compute], backward: list[Compute]) -> None:
    """1F1B: forward runs to warm up, pairs of a forward and a backward one, the remaining backward ones."""
    count, first, last = len(forward), stage == 0, stage == layout.num_stages - 1
    warmup = min(warmup_runs(layout, stage, 1), count)
    for run in forward[:warmup]:
        script.exchange(recv_prev=not first)
        script.actions.append(run)
        script.exchange(send_next=not last)
    if warmup < count:
        script.exchange(recv_prev=not first)
    for k in range(warmup, count):
        script.actions.append(forward[k])
        more = not first and k < count - 1
        if not backward:
            script.exchange(send_next=not last)
            script.exchange(recv_prev=more)
            continue
        script.exchange(send_next=not last, recv_next=not last)
        script.actions.append(backward[k - warmup])
        script.exchange(send_prev=not first, recv_prev=more)
    for run in backward[count - warmup :]:
        script.exchange(recv_next=not last)
        script.actions.append(run)
        script.exchange(send_prev=not first)


@dataclass(frozen=True)
class _Ring:
    """Which of a stage's runs are followed by the receive of its next one. forward, backward: chunks in the order in
    which the stage runs them.

    The first stage is P - 1 runs ahead of the last one, whose outputs come back to it except those of the model's last
    chunk; backward it is the other way round.
    """

    layout: Layout
    stage: int
    forward: list[int]
    backward: list[int]

    def recv_prev(self, k: int) -> bool:
        lead = self.layout.num_stages - 1
        if k == len(self.forward) - 1:
            return False
        return self.stage > 0 or (k >= lead and self.forward[k - lead] + lead != self.layout.num_chunks - 1)

    def recv_next(self, k: int) -> bool:
        lead = self.layout.num_stages - 1
        if k == len(self.backward) - 1:
            return False
        return self.stage < lead or (k >= lead and self.backward[k - lead] - lead != 0)


def _interleaved(
    layout: Layout,
    stage: int,
    script: _Script,
    forward: list[Compute],
    backward: list[Compute],
    group: int,
    overlap_p2p: bool,
) -> None:
    """1F1B over several chunks. With overlap, only the steady state's messages do."""
    count, first, last = len(forward), stage == 0, stage == layout.num_stages - 1
    final = layout.num_chunks - 1
    ring = _Ring(layout, stage, [run.chunk for run in forward], [run.chunk for run in backward])
    warmup = min(warmup_runs(layout, stage, group), count) if backward else count
    inputs, gradients = _Overlapped(script, False), _Overlapped(script, True)

    script.exchange(recv_prev=not first)
    for k in range(warmup):
        script.actions.append(forward[k])
        first_gradient = k == warmup - 1 < count - 1 and not last
        script.exchange(
            send_next=forward[k].chunk != final,
            recv_prev=ring.recv_prev(k),
            recv_next=first_gradient and not overlap_p2p,
        )
        if first_gradient and overlap_p2p:
            gradients.start(send=False, receive=True)
    for k in range(count - warmup):
        ahead, back = forward[warmup + k], backward[k]
        send_next, recv_prev = ahead.chunk != final, ring.recv_prev(warmup + k)
        send_prev, recv_next = back.chunk != 0, ring.recv_next(k)
        if not overlap_p2p:
            script.actions += [ahead, back]
            script.exchange(send_next=send_next, recv_prev=recv_prev, send_prev=send_prev, recv_next=recv_next)
            continue
        if ahead.chunk != 0:
            inputs.wait()
        script.actions.append(ahead)
        inputs.start(send=send_next, receive=recv_prev)
        if back.chunk != final:
            gradients.wait()
        script.actions.append(back)
        gradients.start(send=send_prev, receive=recv_next)
    if backward and warmup == count:
        script.exchange(recv_next=not last)
    for k in range(count - warmup, len(backward)):
        if backward[k].chunk != final:
            gradients.wait()
        script.actions.append(backward[k])
        script.exchange(send_prev=backward[k].chunk != 0, recv_next=ring.recv_next(k))
    script.wait(gradients.sent)
