"""The DepthBench paper's prefill measurement (arXiv 2609.32534): 4096 tokens, batch 8, ten architectures, its shapes.

    python benchmarks/prefill/run.py OUT [--shapes 400m_L16 ...] [--architectures hc ...] [--tokens 4096 --batch 8]
        [--chunk C] [--without-times] [key=value ...]

For each, FLOPs and keys and values of a sequence, the plan's and the measured peak memory, and device-hours for 1e9
tokens. Writes OUT.json, OUT.md and OUT.png; --without-times leaves speed out of the last two, for machines that do
other work besides. key=value goes to all: on a CPU, a smaller width.
"""

import argparse
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from depthbench.inference.load import find_source, load
from depthbench.inference.measure import measure
from depthbench.parallel import startup
from depthbench.paths import CONFIGS
from depthbench.planning.flops import prefill_paper
from depthbench.planning.memory import kv_cache_bytes
from depthbench.planning.prefill import Reading

SHAPES = [f"400m_L{layers}" for layers in (16, 20, 24, 28, 32, 42, 70)]
ARCHITECTURES = sorted(path.stem for path in (CONFIGS / "residual").glob("*.yaml"))
RUN = "depthbench_400m"


@dataclass(frozen=True)
class Row:
    """flops, kv_cache: of one sequence. planned, peak: bytes. hours: of the device, for 1e9 tokens."""

    shape: str
    architecture: str
    flops: float
    kv_cache: int
    planned: int
    peak: int
    tokens_per_second: float
    hours: float


def measured(shape: str, architecture: str, words: Sequence[str], reading: Reading, run: str = RUN) -> Row:
    """One model on one process, gone when this returns. Raises torch.OutOfMemoryError where it does not fit."""
    source = find_source(run, [f"model={shape}", f"residual={architecture}", *words], 1)
    settings = source.run
    tokens = torch.randint(0, settings.model.vocab_size, (reading.batch, reading.tokens))
    try:
        found = measure(load(source, quick=True), tokens, reading, warm_up=True)
    finally:
        startup.stop()
        gc.collect()
    (memory,), (plan,) = found.ranks, found.planned
    return Row(
        shape=shape,
        architecture=architecture,
        flops=prefill_paper(settings, reading.tokens),
        kv_cache=kv_cache_bytes(settings, reading.tokens),
        planned=plan.peak,
        peak=memory.peak,
        tokens_per_second=found.tokens_per_second,
        hours=1e9 / found.tokens_per_second / 3600,
    )


def markdown(rows: Sequence[Row], said: str, *, times: bool = True) -> str:
    headings = ["shape", "architecture", "GFLOPs", "KV, MiB", "peak, MiB", "planned"]
    if times:
        headings += ["tokens/s", "device-hours, 1e9 tokens"]
    lines = [said, "", f"| {' | '.join(headings)} |", f"| --- | --- |{' ---: |' * (len(headings) - 2)}"]
    for row in rows:
        cells = [row.shape, row.architecture, f"{row.flops / 1e9:,.2f}", f"{row.kv_cache / 2**20:,.1f}"]
        cells += [f"{row.peak / 2**20:,.1f}", f"{row.planned / 2**20:,.1f}"]
        if times:
            cells += [f"{row.tokens_per_second:,.0f}", f"{row.hours:,.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], path: Path, *, times: bool = True) -> None:
    from matplotlib.figure import Figure  # the GPU scripts, which import this file, do without

    panels: dict[str, Callable[[Row], float]] = {
        "TFLOPs a sequence": lambda row: row.flops / 1e12,
        "keys and values, MiB a sequence": lambda row: row.kv_cache / 2**20,
        "peak memory, GiB": lambda row: row.peak / 2**30,
    }
    if times:
        panels["device-hours for 1e9 tokens"] = lambda row: row.hours
    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure = Figure(figsize=(4 * len(panels), 4), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(panels))
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for name in dict.fromkeys(row.architecture for row in rows):
            own = [row for row in rows if row.architecture == name]
            axis.plot(
                [shapes.index(row.shape) for row in own], [value(row) for row in own], marker="o", ms=3, label=name
            )
        axis.set_xticks(range(len(shapes)), [shape.rpartition("_")[2] for shape in shapes])
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--machine", default="a machine not named", help="what ran it, for the table")
    parser.add_argument("--without-times", action="store_true", help="no speed in table and figure")
    args = parser.parse_intermixed_args()
    reading = Reading(args.tokens, args.chunk or args.tokens, args.batch)
    said = f"{args.batch} x {args.tokens:,} tokens on {args.machine}; settings: {' '.join(args.words) or 'as shipped'}."
    rows: list[Row] = []
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for shape in args.shapes:
        for architecture in args.architectures:
            rows.append(measured(shape, architecture, args.words, reading))
            print(markdown(rows[-1:], "").splitlines()[-1], flush=True)
            # after each, so that a measurement that is stopped leaves its part
            args.out.with_suffix(".json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(rows, said, times=not args.without_times))
    draw(rows, args.out.with_suffix(".png"), times=not args.without_times)


if __name__ == "__main__":
    main()
