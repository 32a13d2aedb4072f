"""Clocks of a recording: what a point in time is on a CPU and on a GPU, and how ranks' clocks are laid over each other.

A GPU runs behind the process that feeds it, so its times are those of events in its own queue; they are read once a
recording has ended, and nothing waits for them before.
"""

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

ROUNDS = 16


class Clock(Protocol):
    """start: call when a recording begins; returns by how many microseconds the clock may be off the process's own.
    mark: a point in time, taken cheaply. passed: whether the device has come to it. microseconds: on the process's
    monotonic clock; may wait for the device."""

    def start(self) -> float: ...

    def mark(self) -> Any: ...

    def passed(self, mark: Any) -> bool: ...

    def microseconds(self, mark: Any) -> float: ...


class CpuClock:
    def start(self) -> float:
        return 0.0

    def mark(self) -> float:
        return time.perf_counter_ns() / 1e3

    def passed(self, mark: float) -> bool:
        return True

    def microseconds(self, mark: float) -> float:
        return mark


class CudaClock:
    """Marks are events of the current stream. Nothing waits for a message beside it to learn when it is through: with
    CUDA_DEVICE_MAX_CONNECTIONS=1 a stream that waits holds up all that is issued after."""

    def start(self) -> float:
        """CUDA tells times between events as float32 milliseconds, so the first one has to be near."""
        shortest = float("inf")
        for _ in range(ROUNDS):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter_ns() / 1e3
            event.record()
            event.synchronize()
            after = time.perf_counter_ns() / 1e3
            if after - before < shortest:
                shortest, self.base, self.begin = after - before, event, (before + after) / 2
        return shortest / 2

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def microseconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self.begin + self.base.elapsed_time(mark) * 1e3


def make_clock() -> Clock:
    return CudaClock() if torch.cuda.is_available() else CpuClock()


def offset_to_rank_0() -> tuple[float, float]:
    """Microseconds to add to this process's clock to get rank 0's, and by how many that may be off: half of the
    shortest of some round trips. A collective call."""
    group = dist.new_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    clock, answer = CpuClock(), torch.zeros(1, dtype=torch.float64)
    offset, error = 0.0, 0.0
    if rank == 0:
        for peer in range(1, world_size):
            for _ in range(ROUNDS):
                dist.recv(answer, peer, group=group)
                answer[0] = clock.mark()
                dist.send(answer, peer, group=group)
    else:
        error = float("inf")
        for _ in range(ROUNDS):
            asked = clock.mark()
            dist.send(answer, 0, group=group)
            dist.recv(answer, 0, group=group)
            answered = clock.mark()
            if (answered - asked) / 2 < error:
                error = (answered - asked) / 2
                offset = float(answer[0]) - (asked + answered) / 2
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    return offset, error
