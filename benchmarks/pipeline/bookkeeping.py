"""What the history cache costs a CPU, per tensor that a chunk takes from it and pass (forward and backward).

    python benchmarks/pipeline/bookkeeping.py [--stages 4 --chunks 3 --elements 16 --rounds 400 --json]

Two measurements, in one process, with tensors so small that only bookkeeping is left:

- each operation of the cache by itself, over and over: keep, take, the gradient's way into the cache through autograd
  (all of the leaf's backward, which without the cache would be part of another tensor's), deliver;
- a stage's chunks between `Boundary.arrive` and `Boundary.depart`, with the cache and without it in turn: all that
  differs, so the tensors that need not be packed count for the cache.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from depthbench.pipeline import message
from depthbench.pipeline.boundary import Boundary, boundaries
from depthbench.pipeline.cache import HistoryCache, Key
from depthbench.pipeline.edges import Local, Shares
from depthbench.pipeline.layout import layout
from depthbench.residual import architecture
from depthbench.residual.protocol import Shape
from depthbench.residual.state import DepthState

Seconds = dict[str, list[float]]


def operations(elements: int, rounds: int, tensors: int = 32) -> Seconds:
    """Seconds of each operation on one tensor, a round's mean."""
    keys: list[Key] = [(0, f"source.{n}") for n in range(tensors)]
    values = [torch.zeros(elements, 1, 1) for _ in keys]
    cache = HistoryCache()
    found: Seconds = {"keep": [], "take": [], "collect a gradient": [], "deliver": []}
    leaves: list[Tensor] = []

    def keep() -> None:
        for key, value in zip(keys, values, strict=True):
            cache.keep(key, value)

    def take() -> None:
        leaves[:] = [cache.take(key, last=True) for key in keys]

    def collect() -> None:
        torch.autograd.backward(leaves, values)

    def deliver() -> None:
        for key, value in zip(keys, values, strict=True):
            cache.deliver(key, value)

    for _ in range(rounds):
        for name, operation in zip(found, (keep, take, collect, deliver), strict=True):
            found[name].append(timed(operation) / tensors)
        cache.assert_empty()
    return found


def timed(operation: Callable[[], None]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


class Stage:
    """The last stage but one of Full AttnRes, one layer a chunk: what it does with messages, and next to nothing
    else."""

    def __init__(self, stages: int, chunks: int, elements: int, cache_history: bool) -> None:
        residual_class = architecture("block_attnres")
        shape = Shape(num_layers=stages * chunks, hidden_size=1, num_heads=1, num_kv_heads=1, head_dim=1)
        residual = residual_class(residual_class.Config(sublayers_per_block=1), shape)
        self.cache = HistoryCache()
        self.local = Local(sequence=elements, microbatch=1, tensor_parallel=1, sequence_parallel=False)
        self.boundaries = boundaries(
            residual, layout(stages * chunks, stages, chunks), stages - 2, Shares(self.local), cache_history, self.cache
        )
        self.taken = sum(len(boundary.kept.taken) for boundary in self.boundaries)
        self.arriving = [self._message(boundary) for boundary in self.boundaries]

    def _message(self, boundary: Boundary) -> Tensor:
        assert boundary.arriving
        shapes = [self.local.shape(spec) for spec in boundary.arriving.tensors]
        return message.buffer(shapes, torch.float32, torch.device("cpu")).zero_()

    def run(self) -> None:
        """Forward through its chunks and backward through them in reverse, one microbatch."""
        passed: list[tuple[Tensor, Tensor]] = []
        for boundary, arriving in zip(self.boundaries, self.arriving, strict=True):
            packed = arriving.detach().requires_grad_()
            state = boundary.arrive(packed, 0)
            new = torch.stack(list(state.history.values())).sum(0)
            first = len(state.history)
            state = DepthState({}, {**state.history, f"source.{first}": new, f"source.{first + 1}": new * 2})
            passed.append((packed, boundary.depart(state, 0)))
        for _, departing in reversed(passed):
            departing.backward(torch.ones_like(departing))
        self.cache.assert_empty()


def whole_stage(stages: int, chunks: int, elements: int, rounds: int) -> tuple[int, Seconds, list[float]]:
    """Tensors taken from the cache in a pass; seconds of a pass; cache over no cache, difference per such tensor."""
    found: Seconds = {"cache": [], "no cache": []}
    made = {name: Stage(stages, chunks, elements, name == "cache") for name in found}
    for number in range(rounds):
        for name in list(made)[:: 1 if number % 2 else -1]:
            found[name].append(timed(made[name].run))
    taken = made["cache"].taken
    return taken, found, [(a - b) / taken for a, b in zip(found["cache"], found["no cache"], strict=True)]


def spread(seconds: list[float]) -> dict[str, float]:
    """Microseconds: median, and the values that 10 % lie below and above."""
    cuts = statistics.quantiles(seconds, n=10)
    return {"median": statistics.median(seconds) * 1e6, "low": cuts[0] * 1e6, "high": cuts[-1] * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=3, help="of a stage")
    parser.add_argument("--elements", type=int, default=16, help="of a tensor")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    operations(args.elements, 20)  # warm-up
    each = operations(args.elements, args.rounds)
    together = [sum(times) for times in zip(*each.values(), strict=True)]
    taken, passes, difference = whole_stage(args.stages, args.chunks, args.elements, args.rounds)
    rows = {name: spread(values) for name, values in {**each, "all four": together}.items()}
    stage = {name: spread(values) for name, values in passes.items()}
    per_tensor = spread(difference)
    if args.json:
        results = {"operations": rows, "taken": taken, "stage": stage, "difference_per_tensor": per_tensor}
        print(json.dumps({"settings": vars(args), "torch": torch.__version__, **results}, indent=1))
        return
    table = Table()
    table.add_column("microseconds")
    for heading in ("median", "10 %", "90 %"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(f"{name}, a tensor", *(f"{value:.1f}" for value in row.values()))
    table.add_section()
    for name, row in stage.items():
        table.add_row(f"a stage's pass, {name}", *(f"{value:.0f}" for value in row.values()))
    table.add_row(f"difference, for each of {taken} tensors taken", *(f"{value:.1f}" for value in per_tensor.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
