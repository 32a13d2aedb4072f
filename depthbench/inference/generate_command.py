"""`depthbench generate CHECKPOINT`: let a model write on."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from depthbench.errors import UserError
from depthbench.options import at_least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="its folder, or a run's (the newest)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the layout: parallel.tensor=2 and the like")
    parser.add_argument("--prompt", metavar="TEXT", help="what to go on from (default: --file, or standard input)")
    parser.add_argument("--file", type=Path, metavar="FILE", help="a text file with it")
    parser.add_argument("--ids", metavar="IDS", help="it as token ids; no tokenizer is needed then")
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the run's own")
    parser.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens to write at most (default: 128)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="probability to draw from (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")
    parser.add_argument(
        "--stop",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="token that ends the text, beside the tokenizer's end of a document; may be repeated",
    )
    parser.add_argument("--chunk", type=int, default=4096, metavar="C", help="tokens read at once (default: 4096)")
    parser.add_argument("--json", action="store_true", help="print JSON at the end instead of text as it comes")


def run(args: argparse.Namespace) -> int:
    """Run the command on every process; the first one prints. Raises UserError for what the user can mend."""
    from depthbench.parallel import startup

    from .load import find_source, load
    from .pieces import check_chunk, check_ids
    from .sampling import Sampler, Sampling

    rank, processes, _ = startup.world_from_environment()
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    at_least(1, args, "max_tokens")
    source = find_source(args.checkpoint, args.overrides, processes)
    if source.weights is None:
        raise UserError(
            f"{args.checkpoint} names a run's settings, and a model with random weights writes noise: give a "
            "checkpoint, or the folder of a run that has one"
        )
    check_chunk(args.chunk, source.run.parallel.tensor if source.run.parallel.shards_tokens else 1)
    tokenizer, prompt = _prompt(args, source.run, processes)
    if not prompt:
        raise UserError("the prompt is empty: give at least one token")
    size = source.run.model.vocab_size
    if tokenizer:  # a model's vocabulary may be padded
        size = min(size, tokenizer.vocab_size)
    check_ids(min(prompt), max(prompt), size)
    for token in args.stop:
        if not 0 <= token < size:
            raise UserError(
                f"--stop={token} is outside the vocabulary, 0 .. {size - 1}: the model never writes it; give another "
                "id, or leave it out"
            )
    stop = {*args.stop, *([tokenizer.eod] if tokenizer else [])}
    length, trained = len(prompt) + args.max_tokens, source.run.model.sequence_length
    if rank == 0 and length > trained:
        print(f"note: up to {length} tokens, of a model trained on {trained}: see model.rope_scaling", file=sys.stderr)
    loaded = load(source)
    try:
        written = _write(args, loaded, Sampler(sampling, size), prompt, stop, tokenizer, rank)
    finally:
        startup.stop()
    if rank == 0 and args.json:
        print(json.dumps({"checkpoint": source.name, **written}, indent=1))
    return 0


def _prompt(args: argparse.Namespace, settings: Any, processes: int) -> tuple[Any, list[int]]:
    from depthbench.data.tokenizers import load_tokenizer

    from .prompt import parse_ids, read_prompt

    if args.ids is not None:
        if args.prompt is not None or args.file is not None:
            raise UserError("give --ids, or a text with --prompt or --file, one of them")
        return load_tokenizer(args.tokenizer) if args.tokenizer else None, parse_ids(args.ids)
    tokenizer = load_tokenizer(args.tokenizer or settings.data.tokenizer)
    return tokenizer, tokenizer.encode_batch([read_prompt(args.prompt, args.file, processes)])[0]


def _write(
    args: argparse.Namespace, loaded: Any, sampler: Any, prompt: list[int], stop: set[int], tokenizer: Any, rank: int
) -> dict[str, Any]:
    """Everything that was written, as plain data; shown on the way unless JSON is wanted."""
    from .generate import generate
    from .prompt import TextStream

    show = rank == 0 and not args.json

    def out(text: str) -> None:
        if show:
            print(text, end="", flush=True)

    stream = TextStream(tokenizer, prompt, out) if tokenizer else None
    engine = loaded.engine(1, len(prompt) + args.max_tokens, page=args.chunk)
    found = generate(
        engine,
        prompt,
        sampler,
        args.max_tokens,
        stop,
        args.chunk,
        show=stream.add if stream else lambda token: out(f"{token} "),
    )
    if stream:
        stream.finish()
    out("\n")
    return {
        "prompt_tokens": len(prompt),
        "tokens": found.tokens,
        "text": stream.text if stream else None,
        "stopped_by": found.stopped_by,
        "seconds_to_first_token": found.first_seconds,
        "tokens_per_second": found.tokens_per_second,
    }
