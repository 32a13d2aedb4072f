"""Real processes over gloo, forked from a parent that has imported everything and started no threads."""

import contextlib
import faulthandler
import itertools
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORKER_SECONDS = 180


def _worker(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.setpgrp()  # so that whatever a worker leaves behind can be killed with it
    # not sys.stderr: under capsys it has no file descriptor
    faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]
    faulthandler.dump_traceback_later(WORKER_SECONDS, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        result = function(rank, world_size, f"{folder}/store", *args)
        Path(f"{folder}/{rank}.result").write_bytes(pickle.dumps(result))
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
        sys.exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def defer_world(rank: int, world_size: int, store: str) -> None:
    """Let the product start its own process groups, each through a file instead of a network port."""
    original = dist.init_process_group
    worlds = itertools.count()

    def through_file(backend: str, *, timeout: Any, **replaced: Any) -> None:
        shared = dist.FileStore(f"{store}.{next(worlds)}", world_size)
        original(backend, store=shared, rank=rank, world_size=world_size, timeout=timeout)

    dist.init_process_group = through_file  # type: ignore[assignment]


def join_world(rank: int, world_size: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)


def start_workers(world_size: int, function: Callable[..., Any], *args: Any) -> tuple[list[int | None], str, list[Any]]:
    """Run `function(rank, world_size, store, *args)` in `world_size` processes to their ends.

    Returns their exit codes, the failing ones' tracebacks and the results of those that returned.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        processes = [
            context.Process(target=_worker, args=(rank, world_size, folder, function, args))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + WORKER_SECONDS + 30
        # is_alive asks the kernel; join alone would also wait for children that a killed worker left behind
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            processes[0].join(0.05)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                assert process.pid
                os.killpg(process.pid, signal.SIGKILL)
        errors = {rank: Path(f"{folder}/{rank}.error") for rank in range(world_size)}
        messages = [f"rank {rank}:\n{error.read_text()}" for rank, error in errors.items() if error.is_file()]
        found = [Path(f"{folder}/{rank}.result") for rank in range(world_size)]
        results = [pickle.loads(result.read_bytes()) for result in found if result.is_file()]
        return [process.exitcode for process in processes], "\n".join(messages), results


def run_workers(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """As `start_workers`, where all must succeed: their results by rank.

    Raises AssertionError with the failing workers' tracebacks.
    """
    codes, messages, results = start_workers(world_size, function, *args)
    assert not messages and not any(codes), f"exit codes {codes}\n{messages}"
    return results
