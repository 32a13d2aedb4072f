"""Reading on one GPU: speed and peak memory, by architecture, depth and length. Started by `tests/gpu/prefill.sh`.

1.6B L28 Block AttnRes reads 32K and 128K tokens in chunks of 16K; at 400M, 8 sequences of 4096 tokens through L16, L32
and L70 with Pre-LN, Block and Full AttnRes and HC. What was found is written after each part, so that a script that is
stopped leaves it: benchmarks/results/<gpu-name>-prefill.{md,json}.
"""

import gc
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.prefill.run import Row, measured
from depthbench.planning.prefill import Reading

SECONDS = 330
REHEARSED = 128  # lengths are divided by it in a rehearsal
BASE, BLOCK = "pre_ln", "block_attnres"
TINY = (
    *("model.hidden_size=64", "model.ffn_hidden_size=96", "model.num_attention_heads=2", "model.num_kv_heads=2"),
    *("model.vocab_size=512", "train.precision=fp32"),
)


@dataclass(frozen=True)
class Part:
    """A model and what it reads. run: of configs/runs."""

    run: str
    shape: str
    architecture: str
    reading: Reading

    def __str__(self) -> str:
        reading = self.reading
        return f"{self.shape} {self.architecture}: {reading.batch} x {reading.tokens:,} in chunks of {reading.chunk:,}"


def parts(divisor: int = 1) -> Iterator[Part]:
    """divisor: of all lengths, for a rehearsal."""
    chunk = 16384 // divisor
    for tokens in (32768, 131072):
        yield Part("depthbench_1600m", "1600m_L28", BLOCK, Reading(tokens // divisor, chunk))
    short = 4096 // divisor
    for layers in (16, 32, 70):
        for architecture in (BASE, BLOCK, "full_attnres", "hc"):
            yield Part("depthbench_400m", f"400m_L{layers}", architecture, Reading(short, short, 8))


@dataclass
class Report:
    device: str
    torch: str
    seconds: float = 0.0
    rows: list[tuple[Part, Row]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9]+", "-", self.device).strip("-") + "-prefill"
        (folder / f"{name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        (folder / f"{name}.md").write_text(self.markdown())

    def markdown(self) -> str:
        lines = [f"# {self.device}: reading", "", f"One device, torch {self.torch}, {self.seconds:.0f} s in all.", ""]
        lines += [
            "| model | sequences | tokens | chunk | tokens/s | peak, GiB | planned |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for part, row in self.rows:
            reading = part.reading
            cells = [
                f"{part.shape} {part.architecture}",
                str(reading.batch),
                f"{reading.tokens:,}",
                f"{reading.chunk:,}",
            ]
            cells += [f"{row.tokens_per_second:,.0f}", f"{row.peak / 2**30:.2f}", f"{row.planned / 2**30:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *self.overheads(), *(f"- failed: {error}" for error in self.errors)]
        return "\n".join(lines) + "\n"

    def overheads(self) -> list[str]:
        """Of Block AttnRes over Pre-LN, in time, at each shape that has both."""
        speed = {(part.shape, part.architecture): row.tokens_per_second for part, row in self.rows}
        return [
            f"- {shape}: Block AttnRes takes {speed[shape, BASE] / speed[shape, BLOCK] - 1:+.1%} time against Pre-LN"
            for shape, architecture in speed
            if architecture == BASE and (shape, BLOCK) in speed
        ]


def perform(output: Path, *, rehearsal: bool) -> int:
    """Run every part there is time for: as much as the longest one before took. Returns 1 if any failed or was left
    out."""
    began = time.monotonic()
    device = "CPU rehearsal" if rehearsal else torch.cuda.get_device_name()
    report, longest = Report(device, torch.__version__), 0.0
    for part in parts(REHEARSED if rehearsal else 1):
        if report.seconds + longest > SECONDS:
            report.errors.append(f"{part}: no time left")
        else:
            try:
                row = measured(part.shape, part.architecture, TINY if rehearsal else (), part.reading, part.run)
            except Exception as error:  # one part's failure is in the report, and the others are measured
                report.errors.append(f"{part}: {error!r}")
            else:
                report.rows.append((part, row))
                print(f"{part}: {row.tokens_per_second:,.0f} tokens/s, {row.peak / 2**30:.2f} GiB", flush=True)
            gc.collect()  # what a failure still held
            torch.cuda.empty_cache()
        now = time.monotonic() - began
        longest, report.seconds = max(longest, now - report.seconds), now
        report.write(output)
    print(report.markdown())
    return 1 if report.errors else 0
