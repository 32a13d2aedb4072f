"""Worker processes that tokenize units, each on its own pipe.

Unlike ``multiprocessing.Pool`` this notices a worker killed from outside (out of memory) and knows which unit it had;
unlike ``concurrent.futures`` it can end its workers at once and leaves none behind when it is killed itself.
"""

import multiprocessing
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from depthbench.data.prepare_worker import Job, work
from depthbench.data.sources import unit_name
from depthbench.errors import UserError


class Listener(Protocol):
    """Hears how the work goes: characters as they are tokenized, units as they are done."""

    def on_text(self, characters: int) -> None: ...

    def on_unit(self, unit: int) -> None: ...


def tokenize_units(job: Job, units: Sequence[int], workers: int, listener: Listener) -> None:
    """Tokenize the numbered units in ``workers`` new processes.

    Raises:
        UserError: a unit's data is wrong, or a worker died. Other workers are stopped; finished parts stay.
        RuntimeError: a worker failed in our own code; the message holds its traceback.
    """
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads (torch, Arrow) can hang
    waiting = deque(units)
    processes: dict[Connection, SpawnProcess] = {}
    busy: dict[Connection, int] = {}

    def give_next(connection: Connection) -> None:
        busy[connection] = waiting.popleft()
        with suppress(ConnectionError):  # of a dead worker; the receiving side reports it
            connection.send(busy[connection])

    try:
        for _ in range(min(workers, len(waiting))):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()  # the worker's copy is the only one left, so its death closes the pipe
            processes[ours] = process
            give_next(ours)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                try:
                    kind, content = connection.recv()
                except (EOFError, ConnectionError) as error:
                    raise _died(processes[connection], job, busy[connection]) from error
                if kind == "text":
                    listener.on_text(content)
                elif kind == "done":
                    listener.on_unit(content)
                    if waiting:
                        give_next(connection)
                    else:
                        del busy[connection]
                elif kind == "wrong":
                    raise UserError(content)
                else:
                    raise RuntimeError(f"a prepare worker failed on {content}")
    finally:
        for process in processes.values():
            process.terminate()
        for connection, process in processes.items():
            process.join()
            connection.close()


def _died(process: SpawnProcess, job: Job, unit: int) -> UserError:
    process.join()
    return UserError(
        f"a worker died (exit code {process.exitcode}) on {unit_name(job.units[unit])}. "
        "Code -9 mostly means out of memory: try fewer --workers"
    )
