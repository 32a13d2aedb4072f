"""DepthBench's token streams taken over as they are.

``<stem>.npy`` is no NumPy file but bare little-endian uint16 ids. Beside it may lie ``<stem>.meta.json`` (keys
``dtype``, ``eos_token_id``, ``num_tokens``, ...) and ``<stem>.csv.gz``, one ``start,end`` line per document, in tokens.
"""

import glob
import gzip
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import get_bin_path

from depthbench.data.indexed import PrefixInfo
from depthbench.data.outputs import (
    Totals,
    already_prepared,
    check_writable,
    fingerprint,
    new_temporary,
    publish,
    summary,
)
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError

_DTYPE = np.dtype("<u2")
_CHUNK_TOKENS = 4 << 20
_FORMAT = 1


def import_stream(
    inputs: Sequence[str | Path], output: str | Path, tokenizer: Tokenizer, *, force: bool = False
) -> PrefixInfo:
    """Write the streams, one after another, as the data set ``output``.

    Documents are those of ``.csv.gz`` where it exists; elsewhere one ends with each end-of-document id. A single
    stream's tokens are hard-linked where the file system can do that, else copied.

    Raises:
        UserError: a stream is missing, a real NumPy file, damaged, not uint16, or made with another tokenizer.
    """
    prefix = str(output)
    streams = _find(inputs)
    if tokenizer.vocab_size - 1 > np.iinfo(_DTYPE).max:
        raise UserError(
            f"streams hold 16-bit ids, too small for the {tokenizer.vocab_size} ids of {tokenizer.path}: give the "
            "tokenizer they were written with"
        )
    for stream in streams:
        _check_header(stream)
        _check_meta(stream, tokenizer)
    beside = [path for stream in streams for path in (stream, stream.with_suffix(".csv.gz")) if path.exists()]
    identity = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in beside]
    settings = fingerprint(
        {"format": _FORMAT, "streams": identity, "tokenizer": tokenizer.fingerprint, "eod": tokenizer.eod}
    )
    if not force and (infos := already_prepared([prefix], settings)):
        print(f"already prepared: {summary(infos[0])}")
        return infos[0]
    check_writable([prefix], replace=force)
    lengths, counts = [], np.zeros(1 << 16, dtype=np.int64)
    for stream in streams:
        ends, of_stream = _read(stream, tokenizer.eod)
        counts += of_stream
        bounds = stream.with_suffix(".csv.gz")
        if bounds.exists():
            lengths.append(_read_bounds(bounds, int(of_stream.sum())))
        else:
            lengths.append(np.diff(_checked_ends(ends, stream, int(of_stream.sum()), tokenizer), prepend=0))
    _join(streams, new_temporary(get_bin_path(prefix)))
    tokens = int(counts.sum())
    info = publish(
        prefix,
        np.concatenate(lengths).astype(np.int32),
        Totals(sum(map(len, lengths)), tokens, None, counts),
        np.dtype(np.uint16),
        tokenizer,
        [{"path": str(stream), "kind": "stream", "bytes": stream.stat().st_size} for stream in streams],
        settings,
    )
    print(f"imported {summary(info)}")
    return info


def _find(inputs: Sequence[str | Path]) -> list[Path]:
    found: list[Path] = []
    for name in map(str, inputs):
        matches = sorted(glob.glob(os.path.join(name, "*.npy") if os.path.isdir(name) else name, recursive=True))
        if not matches:
            raise UserError(f"no stream at {name}: give .npy files, globs of them, or a folder that holds some")
        found += [Path(match).resolve() for match in matches]
    if len(set(found)) != len(found):
        raise UserError(f"a stream is named twice by {', '.join(map(str, inputs))}")
    return found


def _check_header(stream: Path) -> None:
    size = stream.stat().st_size
    with open(stream, "rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise UserError(
                f"{stream} is a real NumPy file. DepthBench's streams, though named .npy, have no header: write this "
                "one with array.astype('<u2').tofile(path) first"
            )
    if size == 0 or size % _DTYPE.itemsize:
        raise UserError(f"{stream} has {size} bytes, which is no positive multiple of {_DTYPE.itemsize}: truncated?")


def _check_meta(stream: Path, tokenizer: Tokenizer) -> None:
    path = stream.with_suffix(".meta.json")
    if not path.exists():
        return
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    tokens = stream.stat().st_size // _DTYPE.itemsize
    for key, due in (("dtype", _DTYPE.name), ("eos_token_id", tokenizer.eod), ("num_tokens", tokens)):
        if meta.get(key, due) != due:
            raise UserError(
                f"{path} says {key} = {meta[key]}, but the import needs {due} (from {stream.name} and tokenizer "
                f"{tokenizer.path}): another tokenizer, or an incomplete copy?"
            )


def _read(stream: Path, eod: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions after each ``eod`` (int64), and how often each of the 2^16 ids occurs (int64)."""
    ends, counts, start = [], np.zeros(1 << 16, dtype=np.int64), 0
    with open(stream, "rb") as file:
        while (ids := np.fromfile(file, _DTYPE, _CHUNK_TOKENS)).size:
            ends.append(np.flatnonzero(ids == eod) + (start + 1))
            counts += np.bincount(ids, minlength=1 << 16)
            start += ids.size
    return np.concatenate(ends), counts


def _checked_ends(ends: np.ndarray, stream: Path, tokens: int, tokenizer: Tokenizer) -> np.ndarray:
    if ends.size == 0 or ends[-1] != tokens:
        raise UserError(
            f"{stream} does not end in the end-of-document id {tokenizer.eod} of {tokenizer.path} (it occurs "
            f"{ends.size} times in {tokens} tokens): the copy is incomplete, or another tokenizer wrote it"
        )
    return ends


def _read_bounds(path: Path, tokens: int) -> np.ndarray:
    """Return the documents' lengths after checking that they cover the stream without gaps."""
    try:
        with gzip.open(path, "rt") as lines:
            bounds = np.loadtxt(lines, dtype=np.int64, delimiter=",", usecols=(0, 1), ndmin=2)
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path} is no list of start,end lines: {error}") from error
    starts, ends = bounds[:, 0], bounds[:, 1]
    wrong = np.flatnonzero((starts != np.concatenate([[0], ends[:-1]])) | (ends <= starts))
    if wrong.size:
        line = int(wrong[0])
        raise UserError(
            f"{path} line {line + 1}: document {starts[line]},{ends[line]} does not follow on the one before; "
            "documents must cover the stream in order. Without the file, documents end at each end-of-document id"
        )
    if ends.size == 0 or ends[-1] != tokens:
        raise UserError(f"{path} ends at token {ends[-1] if ends.size else 0}, but its stream has {tokens}")
    return np.asarray(ends - starts)


def _join(streams: list[Path], target: str) -> None:
    if len(streams) == 1:
        try:
            os.link(streams[0], target)
            return
        except OSError:
            pass  # another file system, or one without hard links: copy
    with open(target, "wb") as joined:
        for stream in streams:
            with open(stream, "rb") as part:
                shutil.copyfileobj(part, joined, _CHUNK_TOKENS)
