"""Documents of one work unit, streamed: memory stays at one document or one small batch of rows."""

import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from depthbench.data.sources import Kind, Piece, Unit
from depthbench.errors import UserError

_BUFFER_BYTES = 1 << 20
_ROWS = 64
# One .txt file is one document, held and encoded whole; encoding takes some fifty times the text's size.
_MAX_TEXT_FILE_BYTES = 256 << 20


def read_unit(unit: Unit, text_field: str) -> Iterator[str]:
    """Yield the text of every document of ``unit`` in order, empty ones included.

    Raises:
        UserError: the data is damaged or a document is no text; the message names the file and the line or row.
    """
    for piece in unit:
        yield from _READERS[piece.kind](piece, text_field)


def _read_text(piece: Piece, text_field: str) -> Iterator[str]:
    if piece.size > _MAX_TEXT_FILE_BYTES:
        raise UserError(
            f"{piece.path} has {piece.size} bytes, and a .txt file is one document of at most {_MAX_TEXT_FILE_BYTES}: "
            "cut it into files, or into one JSON object per line in a .jsonl file"
        )
    try:
        yield Path(piece.path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{piece.path}: invalid UTF-8 at byte {error.start}") from error


def _read_jsonl(piece: Piece, text_field: str) -> Iterator[str]:
    with open(piece.path, "rb", buffering=_BUFFER_BYTES) as file:
        if piece.start:
            # The line that covers the byte before us belongs to the piece before.
            file.seek(piece.start - 1)
            file.readline()
        position = file.tell()
        while position < piece.stop and (line := file.readline()):
            yield from _document(line, text_field, partial(_where_at_byte, piece.path, position))
            position += len(line)


def _where(path: str, line: int) -> str:
    return f"{path} line {line}"


def _where_at_byte(path: str, position: int) -> str:
    """Name the line that begins at byte ``position``, counted only now that an error needs it."""
    newlines = 0
    with open(path, "rb") as file:
        while position > 0 and (block := file.read(min(position, _BUFFER_BYTES))):
            newlines += block.count(b"\n")
            position -= len(block)
    return _where(path, newlines + 1)


def _read_compressed(piece: Piece, text_field: str) -> Iterator[str]:
    compression = "gzip" if piece.path.endswith(".gz") else "zstd"
    number = 0
    try:
        # Arrow's decompressors report a cut-off file, which Python's zstd binding reads as a shorter one.
        with io.BufferedReader(pa.input_stream(piece.path, compression=compression), _BUFFER_BYTES) as lines:
            for number, line in enumerate(lines, start=1):
                yield from _document(line, text_field, partial(_where, piece.path, number))
    except OSError as error:
        raise UserError(f"{piece.path} is damaged after line {number}: {error}") from error


def _document(line: bytes, text_field: str, where: Callable[[], str]) -> Iterator[str]:
    """Yield the text in one line of JSON; nothing for a blank line."""
    if line.isspace():
        return
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where()}: invalid UTF-8 at byte {error.start} of the line") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where()}: not JSON: {error}. Each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UserError(f"{where()}: a JSON {type(row).__name__} where one JSON object per line is needed")
    if text_field not in row:
        raise UserError(
            f"{where()}: no field {text_field!r}; it has {', '.join(map(repr, row)) or 'none'}. See --field"
        )
    text = row[text_field]
    if not isinstance(text, str):
        raise _not_text(where(), text_field, text)
    if b"\\u" in line:  # only an escape can smuggle half of a surrogate pair past the UTF-8 decoder
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{where()}: field {text_field!r} has half a surrogate pair, which is no text") from error
    yield text


def _read_parquet(piece: Piece, text_field: str) -> Iterator[str]:
    try:
        with pq.ParquetFile(piece.path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
            groups = list(range(piece.start, piece.stop))
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[text_field]):
                yield from _rows(batch.column(0), piece.path, row, text_field)
                row += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{piece.path} is damaged in row groups {piece.start} to {piece.stop}: {error}") from error


def _read_dataset(piece: Piece, text_field: str) -> Iterator[str]:
    table = piece.dataset.select_columns([text_field]).with_format("arrow")
    for row in range(piece.start, piece.stop, _ROWS):
        column = table[row : min(row + _ROWS, piece.stop)].column(text_field)
        yield from _rows(column, piece.path, row, text_field)


def _rows(column: Any, path: str, first: int, text_field: str) -> Iterator[str]:
    """Yield an Arrow column's strings; ``first`` is the 0-based row number of its first element."""
    for row, scalar in enumerate(column, start=first):
        try:
            text = scalar.as_py()
        except UnicodeDecodeError as error:
            raise UserError(f"{path} row {row}: invalid UTF-8 in field {text_field!r}") from error
        if not isinstance(text, str):
            raise _not_text(f"{path} row {row}", text_field, text)
        yield text


def _not_text(where: str, text_field: str, value: object) -> UserError:
    kind = "null" if value is None else f"a {type(value).__name__}"
    return UserError(f"{where}: field {text_field!r} is {kind}, not a string")


_READERS: dict[Kind, Callable[[Piece, str], Iterator[str]]] = {
    "text": _read_text,
    "jsonl": _read_jsonl,
    "compressed": _read_compressed,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
}
