"""What a worker process does: tokenize one unit after another into part files.

Imported by every worker, so it stays free of torch and Megatron, whose import takes seconds.
"""

import contextlib
import hashlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from depthbench.data.parts import PartWriter, finish_unit
from depthbench.data.readers import read_unit
from depthbench.data.sources import Unit, unit_name
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError

# Text handed to one encode_batch: large enough to drown the call's cost, small enough to keep memory flat.
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Job:
    """Everything about one ``prepare`` that its workers need.

    ``splits`` holds the parts' name endings, ``("",)`` or ``("_train", "_valid")``; of two, the second gets
    ``valid_fraction`` of the documents. ``dtype`` is the NumPy name of the output's.
    """

    parts: Path
    units: tuple[Unit, ...]
    text_field: str
    tokenizer: Tokenizer
    dtype: str
    splits: tuple[str, ...]
    valid_fraction: float


def work(connection: Connection, job: Job) -> None:
    """Serve unit numbers from ``connection`` until None comes. Answers, each a pair:

    ``("text", characters)`` after each batch, ``("done", unit)``, ``("wrong", message)`` for what a user can mend, and
    ``("failed", traceback)``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    # A parent that was killed shows as a closed connection, at the next batch at the latest: leave, quietly.
    with contextlib.suppress(EOFError, ConnectionError):
        while (unit := connection.recv()) is not None:
            try:
                tokenize_unit(job, unit, lambda characters: connection.send(("text", characters)))
            except UserError as error:
                connection.send(("wrong", str(error)))
            except ConnectionError:
                raise
            except (OSError, MemoryError) as error:
                connection.send(("wrong", f"{unit_name(job.units[unit])}: {type(error).__name__}: {error}"))
            except Exception:
                connection.send(("failed", f"{unit_name(job.units[unit])}:\n{traceback.format_exc()}"))
            else:
                connection.send(("done", unit))


def tokenize_unit(job: Job, unit: int, on_text: Callable[[int], None]) -> None:
    """Write the part files of unit number ``unit``, calling ``on_text`` with the characters of each batch."""
    empty = 0
    eod = job.tokenizer.eod
    with ExitStack() as stack:
        writers = [
            stack.enter_context(PartWriter(job.parts, unit, split, np.dtype(job.dtype), job.tokenizer.vocab_size))
            for split in job.splits
        ]
        for numbers, texts in _batches(job, unit):
            chosen: list[list[list[int]]] = [[] for _ in writers]
            characters = [0] * len(writers)
            for number, text, ids in zip(numbers, texts, job.tokenizer.encode_batch(texts), strict=True):
                if not ids or text.isspace():
                    empty += 1
                    continue
                if ids[-1] != eod:
                    ids.append(eod)
                split = 0 if len(writers) == 1 else _is_valid(unit, number, job.valid_fraction)
                chosen[split].append(ids)
                characters[split] += len(text)
            for writer, documents, count in zip(writers, chosen, characters, strict=True):
                writer.add(documents, count)
            on_text(sum(characters))
        totals = {split: writer.commit() for split, writer in zip(job.splits, writers, strict=True)}
    finish_unit(job.parts, unit, empty, totals)


def _batches(job: Job, unit: int) -> Iterator[tuple[list[int], list[str]]]:
    """Yield (document numbers within the unit, their texts), bounded by characters."""
    numbers: list[int] = []
    texts: list[str] = []
    characters = 0
    for number, text in enumerate(read_unit(job.units[unit], job.text_field)):
        if texts and characters + len(text) > _BATCH_CHARACTERS:
            yield numbers, texts
            numbers, texts, characters = [], [], 0
        numbers.append(number)
        texts.append(text)
        characters += len(text) + 1  # so that a run of empty documents is bounded too
    if texts:
        yield numbers, texts


def _is_valid(unit: int, number: int, fraction: float) -> bool:
    digest = hashlib.blake2b(f"{unit}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
