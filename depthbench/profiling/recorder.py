"""Records one rank's part of optimizer steps: what it computes, sends, receives and waits for, and when.

Nothing of it is in the code that trains. While a step is recorded, the functions below stand where the schedule, the
transport and the optimizer look for theirs, and afterwards those are back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from depthbench.pipeline.communicator import Communicator, Handle
from depthbench.pipeline.layout import Layout
from depthbench.pipeline.message import Label
from depthbench.pipeline.order import runs
from depthbench.pipeline.transport import Transport

from .clocks import Clock
from .events import Kind, Span


@dataclass(frozen=True)
class _Taken:
    """A span whose times are still the clock's marks."""

    kind: Kind
    begin: Any
    end: Any
    step: int
    place: tuple[int, int, bool]  # chunk, microbatch, backward
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Places:
    """Where a rank's passes are: in which order its stage runs chunks and microbatches."""

    layout: Layout
    stage: int
    microbatches: int
    group: int

    def passes(self, backward: bool) -> Iterator[tuple[int, int, bool]]:
        for chunk, microbatch in runs(self.layout, self.stage, self.microbatches, self.group, backward=backward):
            yield chunk, microbatch, backward


_NOWHERE = (-1, -1, False)


class Recorder:
    """optimizer: with methods `prepare` and `apply`. config: Megatron-Core's."""

    def __init__(self, places: Places, transport: Transport | None, optimizer: Any, config: Any, clock: Clock) -> None:
        self.places, self.transport, self.clock = places, transport, clock
        self.optimizer, self.config = optimizer, config
        self.taken: list[_Taken] = []
        self.number = 0
        self.reducing: Any = None
        self.taken_before = 0  # the reduction began
        self.cache_hit_bytes = self.cache_bytes = 0

    # -- spans ----------------------------------------------------------------------------------------------------
    def add(
        self, kind: Kind, begin: Any, end: Any, place: tuple[int, int, bool] = _NOWHERE, size: int = 0, tensors: int = 0
    ) -> None:
        self.taken.append(_Taken(kind, begin, end, self.number, place, size, tensors))

    @contextmanager
    def span(self, kind: Kind) -> Iterator[None]:
        begin = self.clock.mark()
        yield
        self.add(kind, begin, self.clock.mark())

    def spans(self, offset: float) -> list[Span]:
        """All that have passed, in microseconds. offset: added to each time."""
        times = self.clock.microseconds
        return [
            Span(t.kind, times(t.begin) + offset, times(t.end) + offset, t.step, *t.place, t.bytes, t.tensors)
            for t in self.taken
            if self.clock.passed(t.end)
        ]

    # -- a step ---------------------------------------------------------------------------------------------------
    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records what happens within as step `number`."""
        self.number = number
        with ExitStack() as stack:
            replace = partial(_replace, stack)
            for name, backward in (("forward_step", False), ("backward_step", True)):
                replace(schedules, name, partial(self._pass, self.places.passes(backward), getattr(schedules, name)))
            replace(self.config, "finalize_model_grads_func", self._finalize(self.config.finalize_model_grads_func))
            replace(self.optimizer, "prepare", self._prepare(self.optimizer.prepare))
            replace(self.optimizer, "apply", partial(self._whole, Kind.OPTIMIZER, self.optimizer.apply))
            if self.transport:
                replace(self.transport, "make_communicator", partial(RecordingCommunicator, self))
                replace(self.transport.cache, "take", partial(self._take, self.transport.cache.take))
            with self.span(Kind.STEP):
                yield
        if self.transport:
            self.cache_bytes = max(self.cache_bytes, self.transport.cache.peak_bytes)

    def _pass(self, places: Iterator[tuple[int, int, bool]], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = self.clock.mark()
        result = run(*args, **kwargs)
        place = next(places, None)  # none: a pass that looks for the cause of a loss that is not finite
        if place:
            self.add(Kind.BACKWARD if place[2] else Kind.FORWARD, begin, self.clock.mark(), place)
        return result

    def _whole(self, kind: Kind, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.span(kind):
            return run(*args, **kwargs)

    def _finalize(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def finalize(*args: Any, **kwargs: Any) -> Any:
            self.reducing, self.taken_before = self.clock.mark(), len(self.taken)
            return run(*args, **kwargs)

        return finalize

    def _prepare(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def prepare() -> Any:
            # from the gradients' reduction to here, so that the loss's is in it; between them the last sends are waited
            # for
            begin, after = self.clock.mark(), self.reducing
            for waited in [taken for taken in self.taken[self.taken_before :] if taken.kind.is_wait]:
                self.add(Kind.REDUCE, after, waited.begin)
                after = waited.end
            self.add(Kind.REDUCE, after, begin)
            norm = run()
            self.add(Kind.OPTIMIZER, begin, self.clock.mark())
            return norm

        return prepare

    def _take(self, run: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        value = run(*args, **kwargs)
        self.cache_hit_bytes += value.nbytes
        return value


class RecordingCommunicator(Communicator):
    """As its base; every message and every wait leaves a span."""

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recorder = recorder

    def _send(self, packed: Tensor, *, backward: bool) -> Handle:
        if backward in self.sending:
            self.sending[backward].wait()  # before this message's time begins
        posted = self.recorder.clock.mark()
        return self._recorded(super()._send(packed, backward=backward), Kind.SEND, posted)

    def _receive(self, *, backward: bool) -> Handle:
        posted = self.recorder.clock.mark()
        return self._recorded(super()._receive(backward=backward), Kind.RECEIVE, posted)

    def _recorded(self, handle: Handle, kind: Kind, posted: Any) -> Handle:
        """posted: a mark from just before the message was; it may be through before a mark from after. That it is
        through is seen where it is waited for."""
        recorder, clock, edge = self.recorder, self.recorder.clock, self._edge(handle.label)
        size = self.link.shares.of(handle.label.microbatch).numel(*edge.tensors) * handle.packed.itemsize
        place, wait = _place(handle.label), handle.wait

        def recorded() -> None:
            del handle.wait  # else the handle, and its buffer, would hold itself
            begin = clock.mark()
            wait()
            end = clock.mark()
            waiting = Kind.WAIT_SEND if kind is Kind.SEND else Kind.WAIT_RECEIVE
            recorder.add(waiting, begin, end, place)
            recorder.add(kind, posted, end, place, size, len(edge.tensors))

        handle.wait = recorded  # type: ignore[method-assign]
        return handle


_ABSENT = object()


def _replace(stack: ExitStack, owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Until the stack is left."""
    before = vars(owner).get(name, _ABSENT)
    if before is _ABSENT:  # a method, of the class
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, before)
    setattr(owner, name, ours)


def _place(label: Label) -> tuple[int, int, bool]:
    return label.receiver, label.microbatch, label.backward
