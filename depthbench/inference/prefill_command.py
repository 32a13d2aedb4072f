"""`depthbench prefill RUN|CHECKPOINT --tokens N --chunk C`: read a long text, say how fast and in how much memory."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthbench.errors import UserError
from depthbench.options import at_least

if TYPE_CHECKING:
    from torch import Tensor

    from depthbench.planning.prefill import Reading

    from .load import Source
    from .measure import Measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("source", metavar="RUN|CHECKPOINT", help="a run (random weights), or a checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the layout; of a run any setting")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each sequence (default: the whole file)")
    parser.add_argument("--chunk", type=int, metavar="C", help="tokens read at once (default: all)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences read together (default: 1)")
    parser.add_argument("--input", type=Path, metavar="FILE", help="a text (default: random tokens)")
    parser.add_argument("--page", type=int, metavar="P", help="tokens of a cache's page (default: one page of all)")
    parser.add_argument(
        "--most-ahead", type=int, metavar="Q", help="depth reads done at once (default: as in training)"
    )
    parser.add_argument("--warm-up", action="store_true", help="read the first chunk once before")
    parser.add_argument(
        "--output", type=Path, default=Path("prefill.json"), metavar="FILE", help="default: prefill.json"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON, no table")
    parser.add_argument("--dry-run", action="store_true", help="print the memory planned for GPUs; read nothing")
    parser.add_argument("--cluster", metavar="NAME", help="with --dry-run: whether its GPUs have so much memory")


def run(args: argparse.Namespace) -> int:
    """Run the command on every process; the first one prints. Returns the exit status, 1 where a dry run finds that
    memory does not suffice; raises UserError for what the user can mend."""
    from depthbench.parallel import startup
    from depthbench.planning.prefill import Reading

    from .load import find_source, load
    from .measure import measure
    from .pieces import check_chunk, check_ids

    rank, processes, _ = startup.world_from_environment()
    at_least(1, args, "tokens", "batch", "page", "most_ahead")
    if args.cluster and not args.dry_run:
        raise UserError(f"--cluster={args.cluster} is for --dry-run; what is read here takes what it takes")
    source = find_source(args.source, args.overrides, None if args.dry_run else processes)
    tokens_BT = _tokens(args, source.run)
    count, model = tokens_BT.shape[1], source.run.model
    chunk = count if args.chunk is None else args.chunk
    check_chunk(chunk, source.run.parallel.tensor if source.run.parallel.shards_tokens else 1)
    check_ids(int(tokens_BT.min()), int(tokens_BT.max()), model.vocab_size)
    if rank == 0 and count > model.sequence_length:
        text = f"note: {count} tokens, of a model trained on {model.sequence_length}: see model.rope_scaling"
        print(text, file=sys.stderr)
    reading = Reading(count, chunk, args.batch, args.page, args.most_ahead)
    if args.dry_run:
        return _dry_run(args, source, reading)
    if rank == 0:
        _check_output(args.output)
    loaded = load(source, quick=True)
    try:
        found = measure(loaded, tokens_BT, reading, warm_up=args.warm_up)
    finally:
        startup.stop()
    if rank == 0:
        _report(args, source.name, source.run.architecture, found)
    return 0


def _dry_run(args: argparse.Namespace, source: "Source", reading: "Reading") -> int:
    """Print the plan. Returns the exit status."""
    from depthbench.planning.cluster import load_cluster
    from depthbench.planning.console import print_tables
    from depthbench.planning.prefill import prefill_memory

    from .memory_table import planned_table

    cluster = load_cluster(args.cluster) if args.cluster else None
    stages = prefill_memory(source.run, reading)
    shortage = cluster.shortage(max(stage.peak for stage in stages)) if cluster else ""
    if args.json:
        content = {
            "source": source.name,
            "architecture": source.run.architecture,
            "reading": vars(reading),
            "memory": {"planned_stages": [stage.as_dict() for stage in stages]},
            "fits": not shortage,
        }
        print(json.dumps(content, indent=1))
    else:
        print(_heading(source.name, source.run.architecture, reading))
        print_tables(planned_table(stages))
    if shortage:
        parallel = source.run.parallel
        print(
            f"depthbench: {shortage}: read smaller chunks (--chunk={reading.chunk}), or set more parallel.tensor="
            f"{parallel.tensor} or parallel.pipeline={parallel.pipeline}",
            file=sys.stderr,
        )
    return 1 if shortage else 0


def _tokens(args: argparse.Namespace, settings: Any) -> "Tensor":
    """[B, T]: the same beginning of a text in each row, or random ones."""
    import torch

    if args.input is None:
        if args.tokens is None:
            raise UserError("give --tokens, how many random ones to read, or --input, a text")
        generator = torch.Generator().manual_seed(settings.seed)
        return torch.randint(0, settings.model.vocab_size, (args.batch, args.tokens), generator=generator)
    from depthbench.data.tokenizers import load_tokenizer

    from .prompt import read_file

    ids = load_tokenizer(settings.data.tokenizer).encode_batch([read_file(args.input)])[0]
    if not ids:
        raise UserError(f"{args.input} has no tokens: give a longer text")
    count = len(ids) if args.tokens is None else args.tokens
    if count > len(ids):
        raise UserError(f"--tokens={count}: {args.input} has {len(ids)}; give a longer text, or fewer tokens")
    return torch.tensor(ids[:count]).expand(args.batch, -1)


def _check_output(path: Path) -> None:
    """Raise UserError where it cannot be written: before the work, not after it. Leaves no file that was not there."""
    there = path.exists() or path.is_symlink()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write --output={path}: {error}; name another file") from error


def _report(args: argparse.Namespace, name: str, architecture: str, found: "Measured") -> None:
    from depthbench.planning.console import print_tables

    from .memory_table import table

    content = {"source": name, "architecture": architecture, **found.as_dict()}
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    if args.json:
        print(json.dumps(content, indent=1))
        return
    speed = f"{found.tokens_per_second:,.0f} tokens/s, first token after {found.seconds:.2f} s; in {args.output}"
    print(f"{_heading(name, architecture, found.reading)}\n{speed}")
    print_tables(table(found))


def _heading(name: str, architecture: str, reading: "Reading") -> str:
    return f"{name}: {architecture}, {reading.batch} x {reading.tokens:,} tokens in chunks of {reading.chunk:,}"
