"""A long text through a narrow model, on one process and on two that share tokens: memory by kind, and equal logits.

    python benchmarks/prefill/long.py [--tokens 131072 --chunk 4096 --output benchmarks/results/prefill-long.json]

Block AttnRes of 4 layers and width 32 in float32, random weights. Planned and measured bytes of each kind; logits after
every chunk, on two processes against one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from depthbench.config.load import typed
from depthbench.config.schema import RunConfig
from depthbench.inference.load import Source, load
from depthbench.inference.measure import watched
from depthbench.parallel import startup
from depthbench.planning.prefill import Reading, prefill_memory

MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 96,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "sequence_length": 131072,
}


def run_of(ranks: int) -> RunConfig:
    return typed(
        {
            "name": "narrow",
            "model": MODEL,
            "residual": {"architecture": "block_attnres", "num_blocks": 4},
            "parallel": {"tensor": ranks, "sequence": True, "distributed_optimizer": False},
            "data": {"train": [{"prefix": "none"}], "tokenizer": "none"},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "precision": "fp32"},
        }
    )


def read(ranks: int, reading: Reading, out: Path) -> None:
    """In each process: read chunk by chunk; the first one writes what it found."""
    run = run_of(ranks)
    loaded = load(Source(run, None))
    for stage in loaded.stages:  # queries are zero at first, and every read an average
        for name, parameter in stage.named_parameters():
            if name.endswith("query"):
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
    tokens = torch.randint(0, 512, (1, reading.tokens), generator=torch.Generator().manual_seed(0))
    logits, seconds = [], []
    with watched(loaded) as watch:
        engine = loaded.engine(1, reading.tokens)
        for start in range(0, reading.tokens, reading.chunk):
            began = time.perf_counter()
            found = engine.read(tokens[:, start : start + reading.chunk])
            assert found is not None
            logits.append(found[0].clone())
            seconds.append(time.perf_counter() - began)
    memory = watch.by_kind(engine)
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({"logits": torch.stack(logits), "seconds": seconds, "memory": memory.as_dict()}, out)
    startup.stop()


def launched(ranks: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out = folder / f"{ranks}.pt"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = [__file__, "--tokens", str(args.tokens), "--chunk", str(args.chunk), "--read", str(ranks), str(out)]
    subprocess.run([sys.executable, *launcher, *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--read", nargs=2, metavar=("RANKS", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    reading = Reading(args.tokens, args.chunk)
    if args.read:
        read(int(args.read[0]), reading, Path(args.read[1]))
        return
    content: dict[str, Any] = {"tokens": args.tokens, "chunk": args.chunk, "model": MODEL, "ranks": {}}
    with tempfile.TemporaryDirectory() as folder:
        found = {ranks: launched(ranks, args, Path(folder)) for ranks in (1, 2)}
    for ranks, one in found.items():
        content["ranks"][ranks] = {
            "seconds": sum(one["seconds"]),
            "seconds_of_first_and_last_chunk": [one["seconds"][0], one["seconds"][-1]],
            "measured": one["memory"],
            "planned": prefill_memory(run_of(ranks), reading, "cpu")[0].as_dict(),
        }
    alone, shared = (found[ranks]["logits"] for ranks in (1, 2))
    content["positions_compared"] = len(alone)
    content["largest_difference_over_largest_logit"] = float((alone - shared).abs().max() / alone.abs().max())
    content["likeliest_tokens_equal"] = bool(torch.equal(alone.argmax(-1), shared.argmax(-1)))
    text = json.dumps(content, indent=1)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
