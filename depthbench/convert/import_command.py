"""`depthbench convert import SOURCE OUT`: a foreign model to a checkpoint that a run can start from."""

import argparse
import sys
from pathlib import Path

from depthbench.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments to `parser`."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a Hugging Face folder (a Llama, or an export), or a checkpoint of DepthBench's own code",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; must be empty or not exist")
    parser.add_argument(
        "--residual",
        metavar="NAME",
        help="make another architecture of a Pre-LN model: a name under configs/residual/ or a YAML file",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of that architecture: num_blocks=4; without --residual, of what DepthBench leaves open",
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="of DepthBench's checkpoints that do not say how to read them: a text whose loss tells",
    )
    parser.add_argument(
        "--allow-different", action="store_true", help="import even if that architecture cannot keep the function"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="of the weights (default: the one that holds the source's exactly)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an import that is in OUT")
    parser.add_argument("--no-verify", action="store_true", help="do not run both models to compare them")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 where the checkpoint does not compute what the source does; raises UserError."""
    from .export import DTYPES
    from .importing import import_model
    from .library import need_transformers
    from .olmo import OlmoSource
    from .olmo_unsaid import decided
    from .opening import open_source
    from .source import Source
    from .upcycle import upcycled
    from .verify_import import Runs, verify

    def warn(line: str) -> None:
        print(f"warning: {line}", file=sys.stderr)

    if args.allow_different and not args.residual:
        raise UserError("--allow-different needs --residual: without it the function is always the source's")
    original: Source = open_source(args.source)
    if isinstance(original, Runs) and not args.no_verify:
        need_transformers()
    words, unsaid = args.set, isinstance(original, OlmoSource) and bool(original.unsaid)
    if args.text and not unsaid:
        raise UserError(f"--text={args.text}: {args.source} leaves nothing open that a text could tell; leave it out")
    if isinstance(original, OlmoSource) and unsaid and not args.residual:
        original, words = decided(original, args.set, args.text), []
        for line in original.origin.get("found_by_loss", ()):
            print(line)
    source = original
    if args.residual or words:
        source = upcycled(original, args.residual, words, args.allow_different)
    done = import_model(
        source, args.out, dtype=DTYPES[args.dtype] if args.dtype else None, overwrite=args.overwrite, warn=warn
    )
    size = sum(tensor.bytes for tensor in done.tensors)
    print(f"wrote {done.folder}: {done.run.architecture}, {size / 1e9:.3f} GB", flush=True)
    if args.no_verify:
        return 0
    found = verify(source, done)
    if not found.as_said:
        print(f"depthbench: {found.describe()}. The files are kept in {done.folder}", file=sys.stderr)
        return 1
    print(found.describe())
    return 0
