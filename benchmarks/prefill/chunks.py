"""Chunk by chunk smaller: what the depth state takes by the plan, the peak that is measured, how fast reading still is.

    python benchmarks/prefill/chunks.py OUT.json [key=value ...] [--tokens 4096] [--chunks 4096 1024 ...] [--rounds 7]

Block AttnRes of the 400M series, 16 layers; key=value: on a CPU, a smaller width. Speeds are ratios over the first
chunk's in the same round, in which each chunk has its turn; median and quartiles of the rounds.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.prefill.run import RUN, measured
from depthbench.inference.load import Source, find_source, load
from depthbench.parallel import startup
from depthbench.planning.prefill import Reading, depth_state_bytes

SHAPE, ARCHITECTURE = "400m_L16", "block_attnres"


def speeds(source: Source, readings: Sequence[Reading], rounds: int) -> list[list[float]]:
    """Of each reading, in each round: its speed over the first's."""
    loaded = load(source, quick=True)
    tokens = torch.randint(0, source.run.model.vocab_size, (1, readings[0].tokens))

    def seconds(reading: Reading) -> float:
        engine = loaded.engine(1, reading.tokens)
        began = time.perf_counter()
        logits = engine.read(tokens, reading.chunk)
        assert logits is not None
        logits.argmax().item()  # waits for a GPU
        return time.perf_counter() - began

    try:
        for reading in readings:
            seconds(reading)  # kernels that start slowly
        taken = [[seconds(reading) for reading in readings] for _ in range(rounds)]
    finally:
        startup.stop()
    return [[each[0] / each[number] for each in taken] for number in range(len(readings))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096, 1024, 256, 64, 16, 4])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_intermixed_args()
    source = find_source(RUN, [f"model={SHAPE}", f"residual={ARCHITECTURE}", *args.words], 1)
    readings = [Reading(args.tokens, chunk) for chunk in args.chunks]
    found = speeds(source, readings, args.rounds)
    rows = []
    for reading, ratios in zip(readings, found, strict=True):
        low, _, high = quantiles(ratios, n=4)
        rows.append(
            {
                "chunk": reading.chunk,
                "planned_depth_state": depth_state_bytes(source.run, reading, 0, source.run.model.num_layers),
                "peak": measured(SHAPE, ARCHITECTURE, args.words, reading).peak,
                "speed": median(ratios),
                "quartiles": [low, high],
            }
        )
        print(rows[-1], flush=True)
    content = {"settings": args.words, "tokens": args.tokens, "rounds": args.rounds, "rows": rows}
    args.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
