"""`depthbench convert export CHECKPOINT OUT`: a checkpoint to a folder for Hugging Face's transformers, or for
DepthBench's own code."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from depthbench.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments to `parser`."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or a run's (the newest)")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; must be empty or not exist")
    parser.add_argument(
        "--format",
        choices=("huggingface", "olmo"),
        default="huggingface",
        help="olmo: a checkpoint of DepthBench's own code, a fork of OLMo-core, in the stored types",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of the weights (default: the checkpoint's); what training keeps in float32 stays there",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="of a weight file (default: 1GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace an export that is in OUT")
    parser.add_argument("--no-verify", action="store_true", help="do not run both models to compare them")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 where the export does not compute what the checkpoint does; raises UserError."""
    from .export import DTYPES, export
    from .library import need_transformers
    from .shards import parse_size

    def warn(line: str) -> None:
        print(f"warning: {line}", file=sys.stderr)

    if args.format == "olmo":
        return _olmo(args, warn)
    if not args.no_verify:
        need_transformers()
    done = export(
        args.checkpoint,
        args.out,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        max_shard_bytes=parse_size("1GB" if args.max_shard_size is None else args.max_shard_size),
        overwrite=args.overwrite,
        warn=warn,
    )
    size = sum(tensor.bytes for tensor in done.tensors)
    step = done.weights.checkpoint.step
    print(f"wrote {done.folder}: {done.weights.run.architecture}, step {step}, {size / 1e9:.3f} GB", flush=True)
    if args.no_verify:
        return 0
    from .verify import verify

    found = verify(done)
    if not found.equal:
        print(f"depthbench: {found.describe()}. The files are kept in {done.folder}", file=sys.stderr)
        return 1
    print(found.describe())
    return 0


def _olmo(args: argparse.Namespace, warn: Callable[[str], None]) -> int:
    from .olmo_export import export_olmo, verify_olmo

    if args.dtype:
        raise UserError(f"--dtype={args.dtype}: --format olmo keeps the stored types")
    if args.max_shard_size is not None:
        raise UserError(f"--max-shard-size={args.max_shard_size}: --format olmo writes no safetensors; leave it out")
    done = export_olmo(args.checkpoint, args.out, overwrite=args.overwrite, warn=warn)
    run = done.weights.run
    print(f"wrote {done.folder}: {run.architecture}, step {done.weights.checkpoint.step}, {len(done.tensors)} tensors")
    if args.no_verify:
        return 0
    fault = verify_olmo(done)
    if fault:
        print(f"depthbench: {fault}. The files are kept in {done.folder}", file=sys.stderr)
        return 1
    print("verified: settings and every tensor are read back equal")
    return 0
