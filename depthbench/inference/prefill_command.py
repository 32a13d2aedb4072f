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

    from .measure import Measured

KINDS = {
    "weights": "weights",
    "kv_cache": "key-value cache",
    "depth_state": "depth state",
    "history_cache": "history cache",
    "workspace": "workspace",
    "peak": "peak",
}


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


def run(args: argparse.Namespace) -> int:
    """Run the command on every process; the first one prints. Raises UserError for what the user can mend."""
    from depthbench.parallel import startup
    from depthbench.planning.prefill import Reading

    from .load import find_source, load
    from .measure import measure
    from .pieces import check_chunk, check_ids

    rank, processes, _ = startup.world_from_environment()
    at_least(1, args, "tokens", "batch", "page", "most_ahead")
    source = find_source(args.source, args.overrides, processes)
    tokens_BT = _tokens(args, source.run)
    count, model = tokens_BT.shape[1], source.run.model
    chunk = count if args.chunk is None else args.chunk
    check_chunk(chunk, source.run.parallel.tensor if source.run.parallel.shards_tokens else 1)
    check_ids(tokens_BT, model.vocab_size)
    if rank == 0:
        _check_output(args.output)
    if rank == 0 and count > model.sequence_length:
        text = f"note: {count} tokens, of a model trained on {model.sequence_length}: see model.rope_scaling"
        print(text, file=sys.stderr)
    loaded = load(source, quick=True)
    try:
        found = measure(
            loaded, tokens_BT, Reading(count, chunk, args.batch, args.page, args.most_ahead), warm_up=args.warm_up
        )
    finally:
        startup.stop()
    if rank == 0:
        _report(args, source.name, source.run.architecture, found)
    return 0


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
    count = len(ids) if args.tokens is None else args.tokens
    if not ids or count > len(ids):
        raise UserError(f"--tokens={count}: {args.input} has {len(ids)}; give a longer text, or fewer tokens")
    return torch.tensor(ids[:count]).expand(args.batch, -1)


def _check_output(path: Path) -> None:
    """Raise UserError where it cannot be written: before the work, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(f"cannot write --output={path}: {error}; name another file") from error


def _report(args: argparse.Namespace, name: str, architecture: str, found: "Measured") -> None:
    from rich.console import Console

    content = {"source": name, "architecture": architecture, **found.as_dict()}
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    if args.json:
        print(json.dumps(content, indent=1))
        return
    console = Console()
    reading = found.reading
    console.print(
        f"{name}: {architecture}, {reading.batch} x {reading.tokens:,} tokens in chunks of {reading.chunk:,}\n"
        f"{found.tokens_per_second:,.0f} tokens/s, first token after {found.seconds:.2f} s; in {args.output}",
        highlight=False,
    )
    console.print(table(found))


def table(found: "Measured") -> Any:
    """The fullest rank of each stage, planned beside measured, in MiB."""
    from rich.table import Table

    shown = Table(title="memory of the fullest rank, MiB: planned / measured", title_justify="left")
    shown.add_column("stage")
    for heading in KINDS.values():
        shown.add_column(heading, justify="right")
    for plan in found.planned:
        fullest = max((rank for rank in found.ranks if rank.stage == plan.stage), key=lambda rank: rank.peak)
        pairs = ((getattr(plan, kind), getattr(fullest, kind)) for kind in KINDS)
        shown.add_row(str(plan.stage), *(f"{ours / 2**20:,.2f} / {theirs / 2**20:,.2f}" for ours, theirs in pairs))
    return shown
