"""Signals that end a run early, agreed on by all ranks."""

import signal
from types import FrameType

import torch
import torch.distributed as dist

from depthbench.parallel.signals import STOPPING


class StopSignals:
    """SIGTERM, SIGUSR1 (Slurm's warning before a time limit) and Ctrl-C ask for a checkpoint and an orderly end.

    A scheduler may signal one process or all of them, at any moment; so a rank only notes the signal, and all ranks
    agree at the same point of the loop.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self._previous = {number: signal.signal(number, self._note) for number in STOPPING}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def agreed(self) -> str | None:
        """The signal's name if any rank has got one, on all ranks. A collective call."""
        highest = torch.tensor(self.received, dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return signal.Signals(int(highest)).name if int(highest) else None

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
