"""Checks of prepared token files (Megatron ``.idx``/``.bin``) before anything is built on them."""

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType, get_bin_path, get_idx_path

from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError

_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
_CHUNK_TOKENS = 4 << 20


@dataclass(frozen=True)
class PrefixInfo:
    """What one ``PREFIX.idx``/``.bin`` pair holds. ``sidecar`` is the content of ``PREFIX.json``, if there is one."""

    prefix: str
    documents: int
    tokens: int
    dtype: np.dtype[Any]
    sidecar: dict[str, Any] | None


def check_prefix(
    prefix: str | Path, vocab_size: int | None, tokenizer: Tokenizer | None = None, scan: bool = False
) -> PrefixInfo:
    """Look at a prepared data set and refuse what training would stumble over later.

    Reads the index's header and last entry, file sizes and the sidecar only; ``scan`` also reads every token.

    Args:
        prefix: path without ``.idx``.
        vocab_size: the model's, padding included; None leaves out the checks against it.
        tokenizer: the one the run uses; its fingerprint must be the sidecar's.
        scan: check that each id is below ``vocab_size``.

    Raises:
        UserError: a file is missing, foreign, truncated or empty, or does not fit the vocabulary or the tokenizer.
    """
    prefix = str(prefix)
    bin_path = get_bin_path(prefix)
    for path in (get_idx_path(prefix), bin_path):
        if not os.path.isfile(path):
            raise UserError(f"{path} does not exist: give the path without .idx/.bin, as made by depthbench prepare")
    index = _read_index(get_idx_path(prefix))
    size = os.path.getsize(bin_path)
    if size != index.tokens * index.dtype.itemsize:
        raise UserError(
            f"{bin_path} has {size} bytes but its index says {index.tokens * index.dtype.itemsize} ({index.tokens} "
            f"tokens of {index.dtype.itemsize} bytes): the copy is incomplete or the files do not belong together"
        )
    info = PrefixInfo(prefix, index.documents, index.tokens, index.dtype, read_sidecar(prefix))
    _check_vocabulary(info, vocab_size, tokenizer)
    if scan:
        assert vocab_size is not None, "a scan compares ids with the vocabulary's size"
        scan_tokens(bin_path, index.dtype, index.document_ends(), vocab_size)
    return info


def read_sidecar(prefix: str) -> dict[str, Any] | None:
    """Return the content of ``PREFIX.json``, or None where there is none."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not {"vocab_size", "tokenizer", "settings"} <= content.keys():
            raise ValueError("vocab_size, tokenizer or settings is missing")
    except ValueError as error:
        raise UserError(
            f"{path} is not what depthbench prepare writes ({error}): remove it or prepare again"
        ) from error
    return content


def scan_tokens(
    bin_path: str | Path, dtype: np.dtype[Any], document_ends: np.ndarray, vocab_size: int, eod: int | None = None
) -> None:
    """Read all tokens, in chunks, and check that ids are in ``[0, vocab_size)``.

    Args:
        document_ends: int64, the position after each document's last token.
        eod: if given, each document's last token must be this id.

    Raises:
        UserError: names the first document at fault.
    """
    start = 0
    with open(bin_path, "rb") as file:
        while (ids := np.fromfile(file, dtype=dtype, count=_CHUNK_TOKENS)).size:
            if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
                at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
                document = int(np.searchsorted(document_ends, start + at, side="right"))
                raise UserError(
                    f"{bin_path}: document {document} has id {int(ids[at])} (token {start + at}), outside the "
                    f"vocabulary of {vocab_size}: it was made with another tokenizer"
                )
            if eod is not None:
                first, last = np.searchsorted(document_ends, (start, start + ids.size), side="right")
                wrong = np.flatnonzero(ids[document_ends[first:last] - 1 - start] != eod)
                if wrong.size:
                    raise UserError(
                        f"{bin_path}: document {int(first + wrong[0])} does not end in the end-of-document id {eod}"
                    )
            start += ids.size


@dataclass(frozen=True)
class _Index:
    path: str
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int

    def document_ends(self) -> np.ndarray:
        """Return, as int64, the token position after each document's last token."""
        lengths = np.fromfile(self.path, np.int32, self.sequences, offset=_HEADER.size)
        bounds = np.fromfile(self.path, np.int64, self.documents + 1, offset=_HEADER.size + 12 * self.sequences)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return np.asarray(ends[bounds[1:]])


def _read_index(path: str) -> _Index:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        if header[: len(_INDEX_HEADER)] != _INDEX_HEADER:
            raise UserError(f"{path} is no Megatron index: it begins with {header[:9]!r}, not {_INDEX_HEADER!r}")
        if len(header) < _HEADER.size:
            raise UserError(f"{path} is truncated: {size} bytes, less than the header's {_HEADER.size}")
        _, version, code, sequences, bounds = _HEADER.unpack(header)
        if version != 1:
            raise UserError(f"{path} is a Megatron index of version {version}; only version 1 can be read")
        # Multimodal indices have one more byte for each sequence.
        expected = _HEADER.size + 12 * sequences + 8 * bounds
        if size not in (expected, expected + sequences):
            raise UserError(f"{path} has {size} bytes but its header says {expected}: the copy is incomplete")
        if sequences == 0 or bounds < 2:
            raise UserError(f"{path} holds no document: prepare it from inputs that have text")
        file.seek(_HEADER.size + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 12 * sequences - 8)
        (pointer,) = struct.unpack("<q", file.read(8))
    if code not in {member.value for member in DType}:
        raise UserError(f"{path} has an unknown dtype code {code}")
    dtype = np.dtype(DType.dtype_from_code(code))
    if not np.issubdtype(dtype, np.integer):
        raise UserError(f"{path} holds {dtype.name} values, which are no token ids")
    return _Index(path, dtype, sequences, bounds - 1, pointer // dtype.itemsize + length)


def _check_vocabulary(info: PrefixInfo, vocab_size: int | None, tokenizer: Tokenizer | None) -> None:
    if vocab_size is not None and vocab_size - 1 > np.iinfo(info.dtype).max:
        raise UserError(
            f"{info.prefix} holds {info.dtype.name} ids up to {np.iinfo(info.dtype).max}, too small for the vocabulary "
            f"of {vocab_size}: prepare it again with the run's tokenizer"
        )
    if info.sidecar is None:
        return
    made_with = info.sidecar["tokenizer"]
    if vocab_size is not None and info.sidecar["vocab_size"] > vocab_size:
        raise UserError(
            f"{info.prefix} was prepared with {made_with['path']}, of {info.sidecar['vocab_size']} ids, more than the "
            f"model's vocabulary of {vocab_size}: raise the model's or prepare with its tokenizer"
        )
    if tokenizer is not None and made_with["fingerprint"] != tokenizer.fingerprint:
        raise UserError(
            f"{info.prefix} was prepared with tokenizer {made_with['path']} ({made_with['fingerprint']}), but the run "
            f"uses {tokenizer.path} ({tokenizer.fingerprint}): use the same one for both"
        )
