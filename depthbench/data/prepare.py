"""``depthbench prepare``: text files and data sets to Megatron's indexed token files.

    depthbench prepare --input corpus/*.jsonl --output data/corpus --tokenizer tokenizer.json --valid-fraction 0.01

Workers tokenize units of the input into ``PREFIX.parts``; the parts are then joined in order. An interrupted run takes
up where it was: run the same command. The result does not depend on the number of workers or on interruptions.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from depthbench.data.parts import write_json
from depthbench.data.prepare_worker import Job
from depthbench.data.progress import PrepareProgress
from depthbench.data.readers import read_unit
from depthbench.data.sources import Unit, find_sources, plan_units
from depthbench.data.tokenizers import load_tokenizer, train_sentencepiece
from depthbench.data.worker_pool import tokenize_units
from depthbench.errors import UserError

if TYPE_CHECKING:
    from depthbench.data.indexed import PrefixInfo

# Part of the fingerprint: raise it when the same inputs and settings come to give other files.
_FORMAT = 1
_TRAINING_CHARACTERS = 20_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files (.txt: one document each; .jsonl, .json with "
        "one object a line, plain, .gz or .zst; .parquet), folders or globs of them, or a Hugging Face data set: a "
        "folder made by save_to_disk or a name on the hub",
    )
    add(
        "--output",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin, .idx and .json. Needs twice the room of the result while it runs",
    )
    add("--tokenizer", metavar="PATH", help="SentencePiece .model, tokenizer.json, or a folder with one")
    add(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB",
        help="instead of --tokenizer: train a SentencePiece model of "
        "this size on a sample of the input, to PREFIX.model",
    )
    add("--eod-token", metavar="TOKEN", help="the token that ends a document, where the tokenizer's own is not wanted")
    add("--field", default="text", help="the field that holds the text (default: text)")
    add("--workers", type=int, help="processes (default: as many as CPUs are allowed)")
    add(
        "--valid-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="put about this share of documents into PREFIX_valid, the others into PREFIX_train",
    )
    add("--hf-config", metavar="NAME", help="configuration of a data set on the hub")
    add("--hf-split", metavar="NAME", help="split of a data set (default: train)")
    add(
        "--from-stream",
        action="store_true",
        help="the inputs are DepthBench token streams (headerless uint16 .npy), taken over without tokenizing",
    )
    add("--force", action="store_true", help="replace an existing output")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status; raises UserError for what the user can mend."""
    if args.from_stream:
        if args.tokenizer is None:
            raise UserError("--from-stream needs --tokenizer: the one the streams were written with")
        if args.train_tokenizer is not None or args.valid_fraction:
            raise UserError(
                "--from-stream takes tokens over as they are: leave out --train-tokenizer, --valid-fraction"
            )
        from depthbench.data.streams import import_stream

        import_stream(args.input, args.output, load_tokenizer(args.tokenizer, args.eod_token), force=args.force)
        return 0
    prepare(
        args.input,
        args.output,
        tokenizer=args.tokenizer,
        train_tokenizer=args.train_tokenizer,
        eod_token=args.eod_token,
        text_field=args.field,
        workers=args.workers,
        valid_fraction=args.valid_fraction,
        hf_config=args.hf_config,
        hf_split=args.hf_split,
        force=args.force,
    )
    return 0


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    train_tokenizer: int | None = None,
    eod_token: str | None = None,
    text_field: str = "text",
    workers: int | None = None,
    valid_fraction: float = 0.0,
    hf_config: str | None = None,
    hf_split: str | None = None,
    force: bool = False,
    unit_bytes: int | None = None,
) -> "list[PrefixInfo]":
    """Tokenize ``inputs`` into the data set ``output``, or ``output_train`` and ``output_valid``.

    The parameters are the command's; ``unit_bytes`` is the size of a work unit, by default chosen from the total.

    Returns:
        what each data set holds.

    Raises:
        UserError: a setting or an input is wrong; parts finished by then are kept.
    """
    # They import Megatron, seconds that neither --help nor the workers should pay.
    from depthbench.data.assemble import assemble, has_parts, open_parts
    from depthbench.data.outputs import (
        already_prepared,
        check_apart,
        check_writable,
        fingerprint,
        summary,
        token_dtype,
    )

    if (tokenizer is None) == (train_tokenizer is None):
        raise UserError("give either --tokenizer or --train-tokenizer")
    if not 0.0 <= valid_fraction < 1.0:
        raise UserError(f"--valid-fraction is {valid_fraction}: it must be at least 0 and below 1")
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    if workers < 1:
        raise UserError(f"--workers is {workers}: it must be at least 1")
    output = str(output)
    splits = ("_train", "_valid") if valid_fraction else ("",)
    prefixes = [output + split for split in splits]
    sources = find_sources(inputs, hf_config, hf_split)
    check_apart(inputs, [source.path for source in sources], prefixes)
    units = plan_units(sources, text_field, unit_bytes)
    origin = {
        "format": _FORMAT,
        "sources": [source.identity for source in sources],
        "field": text_field,
        "units": [[(piece.path, piece.start, piece.stop) for piece in unit] for unit in units],
    }
    if tokenizer is not None:
        model = load_tokenizer(tokenizer, eod_token)
    else:
        assert train_tokenizer is not None
        path = _trained(units, text_field, output, train_tokenizer, fingerprint(origin), force)
        model = load_tokenizer(path, eod_token)
    settings = fingerprint(
        {**origin, "tokenizer": model.fingerprint, "eod": model.eod, "valid_fraction": valid_fraction}
    )
    if not force and (infos := already_prepared(prefixes, settings)):
        for info in infos:
            print(f"already prepared: {summary(info)}")
        return infos
    parts = Path(f"{output}.parts")
    # A run interrupted while it gave the output its names resumes over its own files.
    check_writable(prefixes, replace=force or has_parts(parts, settings))
    job = Job(parts, tuple(units), text_field, model, token_dtype(model.vocab_size).name, splits, valid_fraction)
    finished = open_parts(job, settings)
    start = time.monotonic()
    _tokenize(job, finished, workers)
    seconds = time.monotonic() - start
    described = [{"path": source.path, "kind": source.kind, "bytes": source.size} for source in sources]
    infos, empty = assemble(job, prefixes, described, settings)
    shutil.rmtree(parts)
    for info in infos:
        print(f"prepared {summary(info)}")
    tokens = sum(info.tokens for info in infos)
    rate = "" if finished else f", {tokens / seconds:,.0f} tokens/s"
    print(f"{empty:,} empty documents skipped; {seconds:.1f} s of tokenizing with {workers} workers{rate}")
    return infos


def _tokenize(job: Job, finished: set[int], workers: int) -> None:
    """Tokenize the units that are not in ``finished``."""
    todo = [unit for unit in range(len(job.units)) if unit not in finished]
    if finished:
        print(f"resuming: {len(finished)} of {len(job.units)} units are done, in {job.parts}")
    try:
        with PrepareProgress(job.units, finished) as progress:
            tokenize_units(job, todo, workers, progress)
    except UserError as error:
        raise UserError(
            f"{error}\n{job.parts} keeps the finished units; the same command takes up from there"
        ) from error


def _trained(units: list[Unit], text_field: str, prefix: str, vocab_size: int, origin: str, force: bool) -> Path:
    """Return ``PREFIX.model``, trained on a sample from every unit unless an earlier run has done so."""
    model, record = Path(f"{prefix}.model"), Path(f"{prefix}.model.json")
    made_from = {"origin": origin, "vocab_size": vocab_size}
    if model.exists() and not force:
        if not record.exists():
            raise UserError(f"{model} exists: give it as --tokenizer, or replace it with --force")
        if json.loads(record.read_text()) == made_from:
            return model
        print(f"{model} was trained on other inputs or settings: trained anew")
    model.parent.mkdir(parents=True, exist_ok=True)
    model = train_sentencepiece(_sample(units, text_field), Path(prefix), vocab_size)
    write_json(record, made_from)
    print(f"trained {model} of {vocab_size} pieces")
    return model


def _sample(units: list[Unit], text_field: str) -> Iterator[str]:
    """Yield about ``_TRAINING_CHARACTERS`` of text, the same share from the start of each unit."""
    share = -(-_TRAINING_CHARACTERS // len(units))
    for unit in units:
        left = share
        for text in read_unit(unit, text_field):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break
