"""From what the user names to work units: files and data sets, cut into pieces that workers tokenize one by one."""

import glob
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from depthbench.errors import UserError

Kind = Literal["text", "jsonl", "compressed", "parquet", "dataset"]
_SUFFIXES: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "compressed",
    ".json.gz": "compressed",
    ".jsonl.zst": "compressed",
    ".json.zst": "compressed",
    ".parquet": "parquet",
}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
# Enough units to keep many workers evenly busy, few enough that a part is worth a file of its own.
_UNITS_WANTED = 256
_MIN_UNIT_BYTES = 4 << 20
_MAX_UNIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Source:
    """One input file or data set.

    ``size`` is in bytes (of a data set: in memory); ``identity`` changes whenever the content may have.
    """

    kind: Kind
    path: str
    size: int
    identity: tuple[str | int, ...]
    dataset: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Piece:
    """A range of one source: bytes of a JSONL file, row groups of a Parquet file, rows of a data set, else all of it.

    A JSONL piece owns the lines that *begin* in ``[start, stop)``. ``size`` is its share in bytes, for progress.
    """

    kind: Kind
    path: str
    start: int
    stop: int
    size: int
    dataset: Any = field(default=None, compare=False, repr=False)


Unit = tuple[Piece, ...]


def unit_name(unit: Unit) -> str:
    """Say in a few words what a unit covers."""
    first = unit[0]
    of = {"jsonl": "bytes", "parquet": "row groups", "dataset": "rows"}.get(first.kind)
    name = f"{first.path} ({of} {first.start} to {first.stop})" if of else first.path
    return name if len(unit) == 1 else f"{name} and {len(unit) - 1} more pieces up to {unit[-1].path}"


def find_sources(
    inputs: Sequence[str | Path], hf_config: str | None = None, hf_split: str | None = None
) -> list[Source]:
    """Expand files, folders, globs and data set names, in the order given and sorted within each.

    Raises:
        UserError: an input matches nothing, has an unknown suffix, is empty, cannot be loaded, or comes twice.
    """
    sources = [source for name in inputs for source in _expand(str(name), hf_config, hf_split)]
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise UserError(f"{source.path} is named twice by the inputs: name each file once")
        seen.add(source.path)
    if not any(source.size for source in sources):
        raise UserError(f"there is no input: all of {', '.join(map(str, inputs)) or 'an empty list'} is empty")
    return sources


def plan_units(sources: Iterable[Source], text_field: str, unit_bytes: int | None = None) -> list[Unit]:
    """Cut sources into units of about ``unit_bytes`` (by default from the total size), in order.

    The plan depends on the sources alone, so neither the number of workers nor an interruption changes it.

    Raises:
        UserError: a Parquet file is unreadable, it or a data set lacks the field, or there is no row at all.
    """
    sources = list(sources)
    if unit_bytes is None:
        total = sum(source.size for source in sources)
        unit_bytes = min(_MAX_UNIT_BYTES, max(_MIN_UNIT_BYTES, total // _UNITS_WANTED))
    units: list[Unit] = []
    pending: list[Piece] = []  # small neighbors share a unit
    for piece in (piece for source in sources for piece in _cut(source, text_field, unit_bytes)):
        if pending and sum(p.size for p in pending) + piece.size > unit_bytes:
            units.append(tuple(pending))
            pending = []
        pending.append(piece)
    if pending:
        units.append(tuple(pending))
    if not units:
        raise UserError(f"the inputs have no rows: {', '.join(source.path for source in sources)}")
    return units


def _expand(name: str, hf_config: str | None, hf_split: str | None) -> list[Source]:
    path = Path(name)
    if path.is_file():
        return [_file(path)]
    if path.is_dir():
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return [_dataset(name, hf_config, hf_split)]
        files = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p))
        if not files:
            raise UserError(f"folder {path} holds no input: looked for {', '.join(_SUFFIXES)} files in it")
        return [_file(p) for p in files]
    if glob.has_magic(name):
        matches = sorted(p for p in glob.glob(name, recursive=True) if Path(p).is_file())
        if not matches:
            raise UserError(f"no file matches {name!r}")
        return [_file(Path(p)) for p in matches]
    folder_exists = path.parent != Path() and path.parent.exists()
    if _kind(path) or folder_exists or not _HUB_NAME.fullmatch(name):
        raise UserError(f"input {name} does not exist")
    return [_dataset(name, hf_config, hf_split)]


def _kind(path: Path) -> Kind | None:
    return next((kind for suffix, kind in _SUFFIXES.items() if path.name.endswith(suffix)), None)


def _file(path: Path) -> Source:
    kind = _kind(path)
    if kind is None:
        raise UserError(f"{path} is of no known kind: inputs end in {', '.join(_SUFFIXES)}, or are a saved data set")
    path = path.resolve()
    status = path.stat()
    return Source(kind, str(path), status.st_size, (str(path), status.st_size, status.st_mtime_ns))


def _dataset(name: str, hf_config: str | None, hf_split: str | None) -> Source:
    import datasets  # a second of import time that file inputs need not pay

    try:
        if Path(name).is_dir():
            name = str(Path(name).resolve())
            loaded = datasets.load_from_disk(name)
        else:
            loaded = datasets.load_dataset(name, hf_config)
    except Exception as error:  # the hub client raises many kinds, network ones included
        raise UserError(
            f"{name} is neither an existing path nor a data set that could be loaded: {type(error).__name__}: {error}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        split = hf_split or "train"
        if split not in loaded:
            raise UserError(f"data set {name} has no split {split!r}: choose --hf-split from {', '.join(loaded)}")
        loaded = loaded[split]
    elif hf_split is not None:
        raise UserError(f"data set {name} was saved without splits: leave out --hf-split {hf_split}")
    # Nested data (slices of a larger table) reports its full size; it only scales the progress bar.
    size = int(loaded.data.nbytes) if len(loaded) else 0
    identity = (name, hf_config or "", hf_split or "", loaded._fingerprint, len(loaded))
    return Source("dataset", name, size, identity, loaded)


def _cut(source: Source, text_field: str, unit_bytes: int) -> list[Piece]:
    if source.size == 0:
        return []
    if source.kind == "jsonl":
        starts = range(0, source.size, unit_bytes)
        stops = [*starts[1:], source.size]
        return [Piece("jsonl", source.path, a, b, b - a) for a, b in zip(starts, stops, strict=True)]
    if source.kind == "parquet":
        return _cut_parquet(source, text_field, unit_bytes)
    if source.kind == "dataset":
        rows = len(source.dataset)
        _require(text_field, source.dataset.column_names, f"data set {source.path}")
        step = max(1, unit_bytes * rows // source.size)
        ranges = [(a, min(a + step, rows)) for a in range(0, rows, step)]
        share = source.size // rows
        return [Piece("dataset", source.path, a, b, (b - a) * share, source.dataset) for a, b in ranges]
    return [Piece(source.kind, source.path, 0, source.size, source.size)]


def _cut_parquet(source: Source, text_field: str, unit_bytes: int) -> list[Piece]:
    try:
        metadata = pq.read_metadata(source.path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{source.path} cannot be read as Parquet: {error}") from error
    _require(text_field, metadata.schema.to_arrow_schema().names, source.path)
    if metadata.num_rows == 0:
        return []
    pieces: list[Piece] = []
    start = size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= unit_bytes or group + 1 == metadata.num_row_groups:
            pieces.append(Piece("parquet", source.path, start, group + 1, size))
            start, size = group + 1, 0
    return pieces


def _require(text_field: str, names: Sequence[str], where: str) -> None:
    if text_field not in names:
        raise UserError(f"{where} has no field {text_field!r}: choose --field from {', '.join(names)}")
