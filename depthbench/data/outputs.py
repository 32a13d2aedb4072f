"""The files of one prepared data set: when they may be written, how they are written, checked and described.

Everything is written under ``.tmp`` names, checked, renamed, and described last by the sidecar ``PREFIX.json``: a
sidecar that carries the settings' fingerprint stands for a complete data set.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, _IndexWriter, get_bin_path, get_idx_path

from depthbench.data.indexed import PrefixInfo, check_prefix, read_sidecar, scan_tokens
from depthbench.data.parts import write_json
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError


@dataclass(frozen=True)
class Totals:
    """``counts`` holds the occurrences of each id; ``characters`` is None where the text is unknown."""

    documents: int
    tokens: int
    characters: int | None
    counts: np.ndarray


def fingerprint(settings: dict[str, Any]) -> str:
    """Return 16 hex digits that change with any of ``settings`` (which must be JSON)."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype Megatron stores ids of such a vocabulary in."""
    dtype: np.dtype[Any] = np.dtype(DType.optimal_dtype(vocab_size))
    return dtype


def temporary(path: str) -> str:
    return f"{path}.tmp"


def new_temporary(path: str) -> str:
    """Return the temporary name of ``path``, with nothing there.

    A leftover may be a hard link to a stream of the user's (see streams.py): opened for writing, it would empty that.
    """
    Path(temporary(path)).unlink(missing_ok=True)
    return temporary(path)


def already_prepared(prefixes: Sequence[str], settings: str) -> list[PrefixInfo] | None:
    """Return the prefixes' contents if all are complete and were made with these settings, else None."""
    infos = []
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is None or sidecar["settings"] != settings:
            return None
        infos.append(check_prefix(prefix, sidecar["vocab_size"]))
    return infos


def check_apart(inputs: Iterable[str | Path], sources: Iterable[str], prefixes: Sequence[str]) -> None:
    """Refuse outputs that are input files, or lie in an input folder, where a second run would take them for input."""
    files = {os.path.realpath(path) for path in sources}
    folders = [Path(path).resolve() for path in inputs if Path(path).is_dir()]
    for prefix in prefixes:
        for path in _files(prefix):
            if os.path.realpath(path) in files:
                raise UserError(f"the output {path} is also an input: choose another --output")
            for folder in folders:
                if Path(path).resolve().is_relative_to(folder):
                    raise UserError(
                        f"--output {prefix} lies in the input folder {folder}, and would be read as input by the next "
                        "run: write elsewhere, or name the input files by a glob"
                    )


def check_writable(prefixes: Sequence[str], replace: bool) -> None:
    """Make the outputs' folder; refuse to overwrite what is there unless ``replace``."""
    for prefix in prefixes:
        if Path(prefix).is_dir():
            raise UserError(f"--output {prefix} is a folder: add the name its files should begin with")
        for path in _files(prefix):
            if os.path.exists(path) and not replace:
                raise UserError(
                    f"{path} exists and was not made from these inputs and settings: choose another --output, or "
                    "replace it with --force"
                )
    Path(prefixes[0]).parent.mkdir(parents=True, exist_ok=True)


def _files(prefix: str) -> tuple[str, str, str]:
    return get_bin_path(prefix), get_idx_path(prefix), f"{prefix}.json"


def publish(
    prefix: str,
    lengths: np.ndarray,
    totals: Totals,
    dtype: np.dtype[Any],
    tokenizer: Tokenizer,
    sources: list[dict[str, Any]],
    settings: str,
) -> PrefixInfo:
    """Check ``PREFIX.bin.tmp``, write the index, give both their names and write the sidecar.

    Args:
        lengths: tokens of each document, in the order of the file.

    Raises:
        UserError: the file is not what ``lengths`` and ``totals`` say. Nothing has been renamed then.
    """
    bin_path, idx_path = get_bin_path(prefix), get_idx_path(prefix)
    size = os.path.getsize(temporary(bin_path))
    if not size == totals.tokens * dtype.itemsize == int(lengths.sum(dtype=np.int64)) * dtype.itemsize:
        raise UserError(
            f"{temporary(bin_path)} has {size} bytes, but {totals.tokens} tokens of {dtype.itemsize} are due"
        )
    if len(lengths) != totals.documents:
        raise UserError(f"{prefix}: {len(lengths)} documents were written, but {totals.documents} are due")
    ends = np.cumsum(lengths, dtype=np.int64)
    scan_tokens(temporary(bin_path), dtype, ends, tokenizer.vocab_size, tokenizer.eod)
    with _ArrayIndexWriter(temporary(idx_path), dtype.type) as writer:
        writer.write(lengths, None, np.arange(totals.documents + 1, dtype=np.int64))
    # Without a sidecar, new data beside an old index cannot pass for a complete data set.
    Path(f"{prefix}.json").unlink(missing_ok=True)
    os.replace(temporary(bin_path), bin_path)
    os.replace(temporary(idx_path), idx_path)
    sidecar = {
        "documents": totals.documents,
        "tokens": totals.tokens,
        "characters": totals.characters,
        "dtype": dtype.name,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "tokenizer": {"path": str(tokenizer.path.resolve()), "fingerprint": tokenizer.fingerprint},
        "unigram_entropy_nats": entropy(totals.counts),
        "sources": sources,
        "settings": settings,
    }
    write_json(Path(f"{prefix}.json"), sidecar)
    return check_prefix(prefix, tokenizer.vocab_size, tokenizer)


def entropy(counts: np.ndarray) -> float:
    """Return the entropy, in nats, of the distribution that ``counts`` is a sample of: the loss of a unigram model."""
    seen = counts[counts > 0] / counts.sum()
    return float(-(seen * np.log(seen)).sum())


def summary(info: PrefixInfo) -> str:
    """Return one line on a prepared data set."""
    assert info.sidecar is not None, "prepare always writes one"
    return (
        f"{info.prefix}: {info.documents:,} documents, {info.tokens:,} tokens, "
        f"{info.tokens * info.dtype.itemsize / 1e6:,.1f} MB ({info.dtype.name}), "
        f"unigram entropy {info.sidecar['unigram_entropy_nats']:.3f} nats"
    )


class _ArrayIndexWriter(_IndexWriter):
    """Megatron's writer with the byte offsets summed by NumPy: its own loop needs minutes and 40 bytes a document."""

    def _sequence_pointers(self, sequence_lengths: Any) -> Any:
        lengths = np.asarray(sequence_lengths, dtype=np.int64)
        return (np.cumsum(lengths) - lengths) * np.dtype(self.dtype).itemsize
