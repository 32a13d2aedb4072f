"""Training steps of a four-stage pipeline over slow links, with the history cache and without it.

    python -m benchmarks.pipeline.run [--seconds 60 --layers 8 --width 64 --tokens 512 --microbatches 4] [LINK ...]

A LINK is a rate in Mbit/s, or `loopback`. Over a rate, each of the four ranks is a host of its own (see link.py);
loopback joins them without a limit. Every rank holds all variants: Pre-LN, and Full and Block AttnRes each with the
cache and without. They take turns, step by step, and every other round in reverse, so that all meet the same load; a
ratio is the median over rounds of two steps of one round. A step is what the trainer runs: forward, backward, clipping,
AdamW. CPU seconds are those of all ranks together, the threads that move messages included; they depend less on what
else the machine does. Bytes are those of the ledgers, headers not counted. A rank's wait for a message is the time in
`Handle.wait` for one it receives: for the link, for the sender's work, and on few cores for other ranks' as well.
"""

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Container, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.pipeline import link
from depthbench.config.load import typed
from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_run
from depthbench.data.loader import Batch
from depthbench.errors import UserError
from depthbench.model.build import build_stages
from depthbench.parallel import startup
from depthbench.parallel.context import ParallelContext
from depthbench.parallel.megatron import megatron_config
from depthbench.pipeline import communicator
from depthbench.pipeline.build import make_transport
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from depthbench.training.wrapped import wrap

STAGES = 4
LOOPBACK = "loopback"
VARIANTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "pre-ln": ("pre_ln", {}, True),
    "full cache": ("block_attnres", {"sublayers_per_block": 1}, True),
    "full no-cache": ("block_attnres", {"sublayers_per_block": 1}, False),
    "block cache": ("block_attnres", {"num_blocks": 8}, True),
    "block no-cache": ("block_attnres", {"num_blocks": 8}, False),
}
ON_OFF = [("full cache", "full no-cache"), ("block cache", "block no-cache")]
PAIRS = ON_OFF + [(name, "pre-ln") for name in VARIANTS if name != "pre-ln"]
EdgeSums = defaultdict[tuple[int, bool], float]
"""(receiving chunk of an edge, backward) -> a sum over one step."""


def configured(name: str, args: argparse.Namespace) -> RunConfig:
    architecture, residual, cache = VARIANTS[name]
    sequence = min(args.tokens, 128)
    micro_batch = args.tokens // sequence
    head_dim = min(args.width, 64)
    model = {
        "num_layers": args.layers,
        "hidden_size": args.width,
        "ffn_hidden_size": -(-8 * args.width // 3 // 16) * 16,
        "num_attention_heads": args.width // head_dim,
        "vocab_size": 512,
        "sequence_length": sequence,
    }
    train = {"steps": 1000, "global_batch": micro_batch * args.microbatches, "micro_batch": micro_batch}
    run: RunConfig = typed(
        {
            "name": "pipeline",
            "model": model,
            "residual": {"architecture": architecture, **residual},
            "parallel": {"pipeline": STAGES, "virtual_pipeline": args.chunks},
            "pipeline": {"history_cache": cache, "overlap_p2p": args.overlap},
            "data": {"train": [{"prefix": "none"}], "tokenizer": "none"},
            "optimizer": {"lr": 1e-3},
            "train": {**train, "precision": "fp32", "eval_every": 0},
            "checkpoint": {},
            "log": {},
        }
    )
    check_run(run, STAGES)
    return run


class TimedHandle(communicator.Handle):
    """Adds what a receive waits to the sums of the variant whose turn it is."""

    waited: ClassVar[EdgeSums] = defaultdict(float)

    def wait(self) -> None:
        start = time.perf_counter()
        super().wait()
        if self.check is not None:  # a receive: on a CPU all headers are read
            TimedHandle.waited[self.label.receiver, self.label.backward] += time.perf_counter() - start


class Trainee:
    """This rank's stage of one variant, with its optimizer, the batch it learns by heart, and its steps' record."""

    def __init__(self, run: RunConfig, shared: ParallelContext) -> None:
        context = dataclasses.replace(shared, megatron=megatron_config(run))  # wrap leaves hooks of one model in it
        self.transport = make_transport(run, context)
        assert self.transport
        self.model = wrap(run, build_stages(run, context, self.transport), self.transport)
        self.optimizer = Optimizer(run, self.model)
        generator = torch.Generator().manual_seed(0)
        size = (run.train.micro_batch, run.model.sequence_length + 1)
        self.batches: list[Batch] = []
        for _ in range(run.train.global_batch // run.train.micro_batch):
            text = torch.randint(0, run.model.vocab_size, size, generator=generator)
            self.batches.append(
                {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(text[:, 1:].shape)}
            )
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.waits: list[EdgeSums] = []
        self.losses: list[float] = []

    def step(self) -> None:
        TimedHandle.waited = defaultdict(float)
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        self.losses.append(run_microbatches(self.model, self.batches, forward_only=False).mean)
        self.optimizer.apply(1e-4, self.optimizer.prepare())
        dist.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu)
        self.waits.append(TimedHandle.waited)

    def sent(self) -> EdgeSums:
        """Bytes of the last step, by edge."""
        assert self.transport
        found: EdgeSums = defaultdict(float)
        for key, traffic in self.transport.ledger.sent.items():
            found[key] = traffic.bytes
        return found


def measured_rate(rank: int, expected: int) -> float:
    """Mbit/s from rank 0 to rank 1, of half a second's worth."""
    tensor = torch.zeros(expected * 1_000_000 // 8 // 2, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.broadcast(seconds, 1)
    return tensor.numel() * 8 / 1e6 / seconds.item()


def on_every_rank(sums: EdgeSums) -> dict[str, float]:
    """The ranks' sums put together, by edge. A collective call."""
    everyone: list[EdgeSums] = [sums] * STAGES
    dist.all_gather_object(everyone, sums)
    total: EdgeSums = defaultdict(float)
    for one in everyone:
        for key, value in one.items():
            total[key] += value
    return {f"{c - 1}>{c} {'backward' if backward else 'forward'}": v for (c, backward), v in sorted(total.items())}


def train(rank: int, rate: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """In each rank's process: all variants, in turn."""
    communicator.Handle = TimedHandle  # type: ignore[misc]
    runs = {name: configured(name, args) for name in args.variants}
    context = startup.start(next(iter(runs.values())))
    mbits = measured_rate(rank, rate or 8000)
    trainees = {name: Trainee(run, context) for name, run in runs.items()}
    began = time.monotonic()
    rounds, more = -1, torch.ones(())  # the first round warms up
    while more:
        for name in list(trainees)[:: 1 if rounds % 2 else -1]:
            trainees[name].step()
        rounds += 1
        more.fill_(rounds < 3 or time.monotonic() - began < args.seconds)
        dist.broadcast(more, 0)
    for one, other in known(ON_OFF, trainees):
        ours, theirs = trainees[one].losses, trainees[other].losses
        alike = (math.isclose(a, b, rel_tol=1e-3) for a, b in zip(ours, theirs, strict=True))
        assert ours[0] == theirs[0] and all(alike), f"{one} and {other} learn differently: {ours}, {theirs}"
    variants = {}
    for name, trainee in trainees.items():
        edges = {key for waits in trainee.waits for key in waits}
        waits = {key: statistics.median(step[key] for step in trainee.waits[1:]) for key in edges}
        sent = on_every_rank(trainee.sent())
        cpu_seconds = torch.tensor(trainee.cpu_seconds[1:])
        dist.all_reduce(cpu_seconds)
        variants[name] = {
            "seconds": trainee.seconds[1:],
            "cpu_seconds": cpu_seconds.tolist(),
            "bytes": sum(sent.values()),
            "bytes_by_edge": sent,
            "wait_by_edge": on_every_rank(defaultdict(float, waits)),
        }
    startup.stop()
    return {"measured_mbits": mbits, "rounds": rounds, "variants": variants}


def host(
    rank: int, port: int, rate: int | None, args: argparse.Namespace, gate: Barrier, results: Connection | None
) -> None:
    link.die_with_parent()
    torch.set_num_threads(1)
    if rate:
        link.leave_network()
        gate.wait()  # for all to have left
        gate.wait()  # to be plugged in
        link.configure(rank, rate)
        gate.wait()
    device, master = (link.DEVICE, link.address(0)) if rate else ("lo", "127.0.0.1")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(STAGES))
    os.environ.update(MASTER_ADDR=master, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=device)
    found = train(rank, rate, args)
    if results:
        results.send(found)


def measure(rate: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """All variants over one link."""
    fork = multiprocessing.get_context("fork")
    gate = fork.Barrier(STAGES + 1, timeout=60)
    receiver, sender = fork.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hosts: list[BaseProcess] = [
        fork.Process(target=host, args=(rank, port, rate, args, gate, None if rank else sender), daemon=True)
        for rank in range(STAGES)
    ]
    for process in hosts:
        process.start()
    try:
        if rate:
            gate.wait()
            for rank, process in enumerate(hosts):
                assert process.pid
                link.plug_in(rank, process.pid, rate)
            gate.wait()
            gate.wait()
        while not receiver.poll(0.5):
            if failed := [rank for rank, process in enumerate(hosts) if process.exitcode]:
                raise SystemExit(f"rank {failed[0]} ended with exit code {hosts[failed[0]].exitcode}")
        found: dict[str, Any] = receiver.recv()
        for process in hosts:
            process.join(10)
        return found
    finally:
        for rank, process in enumerate(hosts):
            process.kill()
            process.join()
            if rate:
                link.unplug(rank)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which the median lies with 95 % confidence whatever the distribution; all values where they are few."""
    values, n = sorted(values), len(values)
    below = max((k for k in range(n // 2) if sum(math.comb(n, i) for i in range(k + 1)) <= 0.025 * 2**n), default=-1)
    return (values[below], values[n - 1 - below]) if below >= 0 else (values[0], values[-1])


def known(pairs: list[tuple[str, str]], names: Container[str]) -> list[tuple[str, str]]:
    return [(one, other) for one, other in pairs if one in names and other in names]


def ratio(found: dict[str, Any], one: str, other: str, kind: str) -> dict[str, Any]:
    """Of two variants' steps, round by round."""
    pairs = zip(found["variants"][one][kind], found["variants"][other][kind], strict=True)
    values = sorted(a / b for a, b in pairs)
    quarter = len(values) // 4
    return {
        "median": statistics.median(values),
        "interval": interval(values),
        "middle_half": (values[quarter], values[-1 - quarter]),
    }


def with_ratios(found: dict[str, Any]) -> dict[str, Any]:
    ratios = [
        {"of": one, "to": other, **{kind: ratio(found, one, other, kind) for kind in ("seconds", "cpu_seconds")}}
        for one, other in known(PAIRS, found["variants"])
    ]
    return {**found, "ratios": ratios}


def show(name: str, found: dict[str, Any], console: Console) -> None:
    variants = found["variants"]
    limit = "loopback, no limit" if name == LOOPBACK else f"{name} Mbit/s a rank and direction"
    console.print(f"\n{limit} (measured {found['measured_mbits']:.0f} Mbit/s), {found['rounds']} rounds")
    table = Table()
    table.add_column("a step, median")
    for heading in ("seconds", "CPU seconds", "MB sent", "waited s, mean of ranks"):
        table.add_column(heading, justify="right")
    for variant, values in variants.items():
        times = [f"{statistics.median(values[kind]):.3f}" for kind in ("seconds", "cpu_seconds")]
        waited = sum(values["wait_by_edge"].values()) / STAGES
        table.add_row(variant, *times, f"{values['bytes'] / 1e6:.1f}", f"{waited:.3f}")
    console.print(table)
    table = Table()
    table.add_column("ratio of two steps of a round")
    for heading in ("time: median", "95 % interval", "middle half", "CPU time: median", "95 % interval"):
        table.add_column(heading, justify="right")
    for row in found["ratios"]:
        cells = []
        for kind, spans in (("seconds", ("interval", "middle_half")), ("cpu_seconds", ("interval",))):
            cells.append(f"{row[kind]['median']:.3f}")
            cells += ["{:.3f} .. {:.3f}".format(*row[kind][span]) for span in spans]
        table.add_row(f"{row['of']} / {row['to']}", *cells)
    console.print(table)
    for heading, kind, factor, digits in (("MB", "bytes_by_edge", 1e-6, 2), ("waited ms", "wait_by_edge", 1e3, 0)):
        table = Table()
        table.add_column(f"{heading}, edge of chunks")
        for variant in variants:
            table.add_column(variant, justify="right")
        for edge in next(iter(variants.values()))[kind]:
            table.add_row(edge, *(f"{values[kind][edge] * factor:.{digits}f}" for values in variants.values()))
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("links", nargs="*", metavar="LINK", default=[LOOPBACK, "1000", "100"])
    parser.add_argument("--variants", nargs="+", metavar="NAME", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=60, help="of training over each link, at least three rounds")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="a microbatch, in sequences of 128")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=2, help="of each stage")
    parser.add_argument("--overlap", action="store_true", help="pipeline.overlap_p2p")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        rates = [None if name == LOOPBACK else int(name) for name in args.links]
        for name in args.variants:
            configured(name, args)
    except (ValueError, UserError) as error:
        parser.error(str(error))
    if any(rates):
        link.leave_network()
        link.build_bridge()
    found = {}
    for name, rate in zip(args.links, rates, strict=True):
        print(f"measuring {name}", file=sys.stderr)  # no progress bar: its thread would be forked
        found[name] = with_ratios(measure(rate, args))
    if args.json:
        print(json.dumps({"settings": vars(args), "torch": torch.__version__, "links": found}, indent=1))
        return
    console = Console(width=120)
    console.print(
        f"{args.layers} layers, width {args.width}, {args.microbatches} microbatches of {args.tokens} tokens, "
        f"fp32, {STAGES} stages x {args.chunks} chunks{', overlapping messages' if args.overlap else ''}"
    )
    for name, values in found.items():
        show(name, values, console)


if __name__ == "__main__":
    main()
