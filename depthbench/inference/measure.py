"""Reading a text with a stopwatch and every kind of memory watched, on each rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from depthbench.planning.prefill import PrefillMemory, Reading, prefill_memory
from depthbench.profiling.live_storages import LiveStorages
from depthbench.residual.state import DepthState

from .engine import Engine
from .load import Loaded


class DepthWatch:
    """The most bytes that a rank's depth state has had after a sublayer, each tensor counted once."""

    def __init__(self) -> None:
        self.peak = 0

    def __call__(self, sublayer: int, state: DepthState) -> None:
        tensors = (*state.live.values(), *state.history.values())
        self.peak = max(self.peak, sum({t.data_ptr(): t.nbytes for t in tensors}.values()))


class Watch:
    """What a rank has held since `watched` began."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.depth = loaded, DepthWatch()
        self.storages = None if torch.cuda.is_available() else LiveStorages()

    def by_kind(self, engine: Engine) -> PrefillMemory:
        """workspace: what of the peak is of no other kind."""
        weights, transport, cache = self.loaded.weight_bytes, self.loaded.transport, engine.cache.bytes
        peak = self.storages.peak + weights if self.storages else torch.cuda.max_memory_allocated()
        history = transport.cache.peak_bytes if transport else 0
        rest = peak - weights - cache - self.depth.peak - history
        return PrefillMemory(transport.stage if transport else 0, weights, cache, self.depth.peak, history, rest)


@contextmanager
def watched(loaded: Loaded) -> Iterator[Watch]:
    """Around the making of an engine and its reading."""
    watch = Watch(loaded)
    for stage in loaded.stages:
        stage.observer = watch.depth
    if watch.storages is None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    try:
        with watch.storages or nullcontext():
            yield watch
    finally:
        for stage in loaded.stages:
            stage.observer = None


@dataclass(frozen=True)
class Measured:
    """seconds: until the token after the text was known, on the slowest rank. ranks: bytes of each, by rank, in the
    plan's kinds. planned: of each stage. next: that token, of each sequence."""

    reading: Reading
    seconds: float
    ranks: list[PrefillMemory]
    planned: list[PrefillMemory]
    next: list[int]

    @property
    def tokens_per_second(self) -> float:
        return self.reading.tokens * self.reading.batch / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "reading": asdict(self.reading),
            "tokens_per_second": self.tokens_per_second,
            "seconds_to_first_token": self.seconds,
            "next_tokens": self.next,
            "memory": {
                "ranks": [rank.as_dict() for rank in self.ranks],
                "planned_stages": [stage.as_dict() for stage in self.planned],
            },
        }


def measure(loaded: Loaded, tokens_BT: Tensor, reading: Reading, *, warm_up: bool = False) -> Measured:
    """A collective call of all ranks. warm_up: read the first chunk once before, for kernels that start slowly.

    On a CPU every storage is tracked, which costs some microseconds an operation. Raises UserError as `Engine.read`.
    """
    if warm_up:
        start = tokens_BT[:, : reading.chunk]
        loaded.engine(reading.batch, start.shape[1], reading.page, reading.most_ahead).read(start, reading.chunk)
    with watched(loaded) as watch:
        engine = loaded.engine(reading.batch, tokens_BT.shape[1], reading.page, reading.most_ahead)
        dist.barrier()
        began = time.perf_counter()
        logits = engine.read(tokens_BT, reading.chunk)
        next_tokens: list[int] = engine.from_last_stage(None if logits is None else logits.argmax(-1)).tolist()
        seconds = time.perf_counter() - began
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (seconds, watch.by_kind(engine)))
    return Measured(
        reading,
        max(seconds for seconds, _ in everyone),
        [memory for _, memory in everyone],
        prefill_memory(loaded.run, reading, engine.device.type),
        next_tokens,
    )
