"""Step time and memory of every residual architecture over Pre-LN's, measured side by side.

    python benchmarks/residual/run.py [--layers 12 --width 512 --tokens 2048 --rounds 7 --precision fp32] [NAME ...]

A step is what the trainer runs: forward, backward, clipping, AdamW. For each architecture one process builds it and
Pre-LN at the same shape and lets them take turns, step by step, so that both meet the same load; the time ratio is the
median over the turns. Memory is the peak of one step over what the weights, gradients and moments hold, from CUDA's
allocator or, on a CPU, from torch's tracker of every storage.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from depthbench.config.load import read_yaml, typed
from depthbench.config.schema import RunConfig
from depthbench.data.loader import Batch
from depthbench.model.build import build_stage
from depthbench.parallel import startup
from depthbench.profiling.live_storages import LiveStorages
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from depthbench.training.wrapped import wrap

RESIDUALS = Path(__file__).parents[2] / "configs/residual"
BASE = "pre_ln"


def configured(name: str, args: argparse.Namespace) -> RunConfig:
    head_dim = 64 if args.width % 64 == 0 else args.width // 8
    model = {
        "num_layers": args.layers,
        "hidden_size": args.width,
        "ffn_hidden_size": -(-8 * args.width // 3 // 16) * 16,
        "num_attention_heads": args.width // head_dim,
        "vocab_size": args.vocabulary,
        "sequence_length": min(args.tokens, 2048),
    }
    train = {"steps": 1000, "global_batch": max(args.tokens // 2048, 1), "micro_batch": max(args.tokens // 2048, 1)}
    return typed(
        {
            "name": name,
            "model": model,
            "residual": read_yaml(RESIDUALS / f"{name}.yaml"),
            "parallel": {"recompute": args.recompute},
            "data": {"train": [{"prefix": "none"}], "tokenizer": "none"},
            "optimizer": {"lr": 1e-3},
            "train": {**train, "precision": args.precision},
            "checkpoint": {},
            "log": {},
        }
    )


class Trainee:
    """A model with its optimizer, and the one batch it learns by heart."""

    def __init__(self, run: RunConfig, context: Any) -> None:
        stage = build_stage(run, context).to(torch.cuda.current_device())
        self.ddp = wrap(run, [stage])
        self.optimizer = Optimizer(run, self.ddp)
        generator = torch.Generator().manual_seed(0)
        size = (run.train.micro_batch, run.model.sequence_length + 1)
        text = torch.randint(0, run.model.vocab_size, size, generator=generator)
        self.batch: Batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(text[:, 1:].shape)}

    def step(self) -> float:
        """Seconds of one step."""
        synchronize()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        run_microbatches(self.ddp, [self.batch], forward_only=False)
        self.optimizer.apply(1e-4, self.optimizer.prepare())
        synchronize()
        return time.perf_counter() - start

    def peak_bytes(self) -> int:
        """Most that one step holds beyond what is there before it."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step()
            return torch.cuda.max_memory_allocated() - before
        with LiveStorages() as storages:
            self.step()
        return storages.peak


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(name: str, args: argparse.Namespace, results: Any) -> None:
    """In a process of its own: the architecture against Pre-LN."""
    runs = [configured(BASE, args), configured(name, args)]
    context = startup.start(runs[0])
    base, other = (Trainee(run, context) for run in runs)
    memory = [trainee.peak_bytes() for trainee in (base, other)]  # also the warm-up
    times = [(base.step(), other.step()) for _ in range(args.rounds)]
    results.put(
        {
            "architecture": name,
            "time_ratio": statistics.median(b / a for a, b in times),
            "memory_ratio": memory[1] / memory[0],
            "seconds": statistics.median(b for _, b in times),
            "base_seconds": statistics.median(a for a, _ in times),
            "peak_bytes": memory[1],
            "base_peak_bytes": memory[0],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="files of configs/residual; all unless given")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="a step, in sequences of at most 2048")
    parser.add_argument("--vocabulary", type=int, default=50280)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = args.names or sorted(path.stem for path in RESIDUALS.glob("*.yaml"))
    found = []
    spawn = multiprocessing.get_context("spawn")
    for name in track(names, console=Console(stderr=True), description="measuring"):
        results = spawn.SimpleQueue()
        process = spawn.Process(target=measure, args=(name, args, results))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name} ended with exit code {process.exitcode}")
        found.append(results.get())
    if args.json:
        print(json.dumps({"settings": vars(args), "torch": torch.__version__, "results": found}, indent=1))
        return
    table = Table(title=f"{args.layers} layers, width {args.width}, {args.tokens} tokens, {args.precision}")
    for heading in ("architecture", "step time / Pre-LN", "peak memory / Pre-LN", "seconds", "Pre-LN's", "peak MB"):
        table.add_column(heading, justify="left" if heading == "architecture" else "right")
    for row in found:
        cells = (f"{row['time_ratio']:.3f}", f"{row['memory_ratio']:.3f}", f"{row['seconds']:.3f}")
        table.add_row(row["architecture"], *cells, f"{row['base_seconds']:.3f}", f"{row['peak_bytes'] / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
