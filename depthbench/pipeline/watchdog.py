"""Ends a run in which a stage waits for another one for ever.

A lost or stuck process leaves the others waiting in a collective for a process group's timeout, half an hour, and then
with a message that names no cause. A stage that waits longer for a message than `limit` seconds, or for a collective
after the passes, says for which, and ends its process with a status of its own, so that torchrun ends the others.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

EXIT_CODE = 4


def _end(text: str, delay: float) -> None:
    """Ends the process whatever becomes of the words: stderr may be closed, a disk full. delay: seconds until then."""
    try:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
        with suppress(OSError):  # under torchrun into a file, which a Slurm job reads
            get_error_handler().record_exception(TimeoutError(text))
        time.sleep(delay)
    finally:
        os._exit(EXIT_CODE)


class Watchdog:
    """limit: seconds; none: never. A thread looks at what this process waits for, as long as the process lives."""

    def __init__(self, limit: float | None, where: str, end: Callable[[str, float], None] = _end) -> None:
        self.where, self.end = where, end
        self._lock = threading.Lock()
        self._waits: dict[int, tuple[float, str, Any]] = {}
        self._next = 0
        if limit:
            threading.Thread(target=self._watch, args=(limit,), daemon=True, name="pipeline-watchdog").start()

    @contextmanager
    def waiting(self, what: str, work: Any = None) -> Iterator[None]:
        """Around a wait. On a GPU `work.wait` returns at once, and the message is watched until it is through."""
        with self._lock:
            key, self._next = self._next, self._next + 1
            self._waits[key] = (time.monotonic(), what, work)
        try:
            yield
        finally:
            if work is None or work.is_completed():
                with self._lock:
                    self._waits.pop(key, None)

    def _watch(self, limit: float) -> None:
        every = min(limit / 4, 5.0)
        while True:
            time.sleep(every)
            now = time.monotonic()
            with self._lock:
                for key, (_, _, work) in list(self._waits.items()):
                    if work is not None and work.is_completed():
                        del self._waits[key]
                late = [(now - began, what) for began, what, _ in self._waits.values() if now - began > limit]
            if late:
                seconds, what = max(late)
                text = f"{self.where}: waited {seconds:.0f} s for the {what} (limit {limit:g} s); giving up"
                # the first process to end takes the others with it: until then they have looked too, and said their own
                self.end(text, 2 * every)
                return
