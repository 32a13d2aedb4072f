"""A stand-in for torch.distributed between threads, as strict as NCCL: messages of one queue go one at a time in the
order in which a process has started them, and each only once the other process has come to it too. One thread runs at a
time, so a deadlock is seen at once: all of them wait."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from depthbench.parallel import cpu_stand_in


@dataclass(eq=False)
class Work:
    """One end of a message."""

    network: "Network"
    group: "Group"
    send: bool
    source: int
    destination: int
    tensor: Tensor
    done: bool = False

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.network.wait(self)


@dataclass(frozen=True)
class Group:
    """A process group as one of its ranks sees it. number: that of the group, the same on all ranks."""

    network: "Network"
    me: int
    stages: int
    number: int

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return self.stages


@dataclass(eq=False)
class Network:
    """by_pair: a group has a queue for each two of its processes, as NCCL has until a group is connected beforehand;
    otherwise each process has one queue for the whole group, as where `init_process_group` was told the device.

    turn: held by the thread that runs. queues: ends of messages that have not met their other end.
    """

    ranks: int
    by_pair: bool = True
    turn: threading.Condition = field(default_factory=threading.Condition)
    queues: dict[tuple[int, int, int | None], deque[Work]] = field(default_factory=dict)
    waiting: set[Work] = field(default_factory=set)
    ended: int = 0
    failed: bool = False

    def queue(self, group: int, rank: int, peer: int) -> deque[Work]:
        return self.queues.setdefault((group, rank, peer if self.by_pair else None), deque())

    def post(self, group: Group, peer: int, tensor: Tensor, *, send: bool) -> Work:
        ends = (group.me, peer) if send else (peer, group.me)
        work = Work(self, group, send, *ends, tensor)
        self.queue(group.number, group.me, peer).append(work)
        while self._deliver(group.number):
            self.turn.notify_all()
        return work

    def _deliver(self, group: int) -> bool:
        """One message whose ends are both first in their queues, if there is one."""
        for queue in [queue for key, queue in self.queues.items() if key[0] == group and queue and queue[0].send]:
            sent = queue[0]
            other = self.queue(group, sent.destination, sent.source)
            if not other or other[0].send or other[0].source != sent.source:
                continue
            received = other[0]
            assert sent.tensor.shape == received.tensor.shape, "the two ends of a message differ in size"
            received.tensor.detach().copy_(sent.tensor)
            sent.done = received.done = True
            queue.popleft()
            other.popleft()
            return True
        return False

    def _look(self) -> None:
        """Ends all waits if none of them can come to an end."""
        if len(self.waiting) == self.ranks - self.ended and not any(work.done for work in self.waiting):
            self.failed = True
            self.turn.notify_all()

    def wait(self, work: Work) -> None:
        self.waiting.add(work)
        self._look()
        self.turn.wait_for(lambda: work.done or self.failed)
        self.waiting.discard(work)
        if not work.done:
            raise RuntimeError("deadlock, or another rank has failed")

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """One a rank. Raises what the first one to fail has raised."""
        errors: list[BaseException] = []

        def alone(body: Callable[[], None]) -> None:
            with self.turn, cpu_stand_in._CudaToCpu():  # each thread has function modes of its own
                try:
                    body()
                except BaseException as error:
                    errors.append(error)
                    self.failed = True
                self.ended += 1
                self._look()
                self.turn.notify_all()

        threads = [threading.Thread(target=alone, args=(body,), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        if errors:
            raise errors[0]


class Here(threading.local):
    """The rank that a thread is, and how many groups it has made."""

    network: Network
    me: int
    made: int


here = Here()


def new_group(ranks: list[int], timeout: timedelta) -> Group:
    """A collective call: the k-th group of one rank is the k-th group of another."""
    here.made += 1
    return Group(here.network, here.me, len(ranks), here.made)


def all_gather_object(everyone: list[Any], mine: Any) -> None:
    everyone[:] = [mine] * len(everyone)  # there is one pipeline


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of torch.distributed that the pipeline makes, on a `Network`."""

    def isend(tensor: Tensor, peer: int, group: Group) -> Work:
        return group.network.post(group, peer, tensor, send=True)

    def irecv(tensor: Tensor, peer: int, group: Group) -> Work:
        return group.network.post(group, peer, tensor.fill_(torch.nan), send=False)

    ours = {
        "is_initialized": lambda: True,
        "get_world_size": lambda: here.network.ranks,
        "get_process_group_ranks": lambda group: list(range(group.size())),
        "get_global_rank": lambda group, rank: rank,
        "all_gather_object": all_gather_object,
        "new_group": new_group,
        "isend": isend,
        "irecv": irecv,
    }
    for name, function in ours.items():
        monkeypatch.setattr(dist, name, function)
