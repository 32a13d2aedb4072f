"""Chunk by chunk smaller: what the depth state takes by the plan, the peak that is measured, how fast reading still is.

    python benchmarks/prefill/chunks.py OUT.json [key=value ...] [--tokens 4096] [--chunks 4096 1024 ...]

Block AttnRes of the 400M series, 16 layers; key=value: on a CPU, a smaller width.
"""

import argparse
import json
from pathlib import Path

from benchmarks.prefill.run import RUN, measured
from depthbench.inference.load import find_source
from depthbench.planning.prefill import Reading, depth_state_bytes

SHAPE, ARCHITECTURE = "400m_L16", "block_attnres"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096, 1024, 256, 64, 16, 4])
    args = parser.parse_intermixed_args()
    run = find_source(RUN, [f"model={SHAPE}", f"residual={ARCHITECTURE}", *args.words], 1).run
    rows = []
    for chunk in args.chunks:
        reading = Reading(args.tokens, chunk)
        row = measured(SHAPE, ARCHITECTURE, args.words, reading)
        state = depth_state_bytes(run, reading, 0, run.model.num_layers)
        rows.append(
            {
                "chunk": chunk,
                "planned_depth_state": state,
                "peak": row.peak,
                "tokens_per_second": row.tokens_per_second,
            }
        )
        print(rows[-1], flush=True)
    args.out.write_text(json.dumps({"settings": args.words, "tokens": args.tokens, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
