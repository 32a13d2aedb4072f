"""The rows of a domain task: from a local file or folder of its name, or from the hub."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from depthbench.errors import UserError

from .domain import DomainTask, Row

_SUFFIXES = (".jsonl", ".parquet", "")  # none: a folder that `datasets` saved


def find_sources(folder: Path, tasks: list[DomainTask]) -> dict[str, Path]:
    """Each task's file under `folder`. Raises UserError naming every task that has none, and what was looked for."""
    if not folder.is_dir():
        raise UserError(f"--data={folder} is no folder")
    places = {task.name: [folder / f"{task.name}{suffix}" for suffix in _SUFFIXES] for task in tasks}
    found = {name: next((path for path in paths if path.exists()), None) for name, paths in places.items()}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        looked = "; ".join(f"{name}: {', '.join(path.name for path in places[name])}" for name in missing)
        have = [name for name in found if name not in missing]
        rest = f", or give --domain-nll {','.join(have)}" if have else ""
        raise UserError(f"{folder} lacks {len(missing)} of {len(tasks)} tasks (looked for {looked}); add them{rest}")
    return {name: path for name, path in found.items() if path}


def read_rows(task: DomainTask, source: Path | None, limit: int | None) -> list[Row]:
    """The first `limit` rows of `source`, or of the hub's set where it is None, with all fields that the task needs.

    Raises UserError for a set that cannot be had or read, that is empty, or that has a row without a field.
    """
    place = str(source) if source else task.dataset
    rows = _local(task, source) if source else _hub(task)
    if not rows:
        raise UserError(f"{place} has no rows")
    rows = rows[:limit]
    for number, row in enumerate(rows):
        for field in task.fields:
            expected = list if field == "test_list" else str
            if not isinstance(row.get(field), expected):
                said = f"{field!r} as {type(row[field]).__name__}" if field in row else f"no field {field!r}"
                raise UserError(
                    f"{place} row {number} has {said}; {task.name} needs {', '.join(task.fields)}, "
                    f"the row has {', '.join(row)}"
                )
    return rows


def _local(task: DomainTask, source: Path) -> list[Row]:
    if source.is_dir():
        try:
            loaded = datasets.load_from_disk(str(source))
        except (OSError, ValueError) as error:
            raise UserError(f"{source} is no data set that `datasets` saved: {error}") from error
        if isinstance(loaded, datasets.DatasetDict):
            if task.split not in loaded:
                raise UserError(f"{source} has no split {task.split!r}, only {', '.join(loaded)}; save the split alone")
            loaded = loaded[task.split]
        return list(loaded)
    if source.suffix == ".parquet":
        try:
            table: list[Row] = pq.read_table(source).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{source} cannot be read as Parquet: {error}") from error
        return table
    rows = []
    try:
        lines = source.read_text(encoding="utf-8").split("\n")  # splitlines would part at U+2028, which JSON may hold
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_object(line, f"{source} line {number}"))
    return rows


def _object(line: str, where: str) -> Row:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON {type(row).__name__} where an object is needed")
    return row


def _hub(task: DomainTask) -> list[Row]:
    try:
        return list(datasets.load_dataset(task.dataset, task.config, split=task.split))
    except Exception as error:  # the hub client raises many kinds, network ones included
        raise UserError(
            f"{task.name}: the hub's {task.dataset} cannot be had ({type(error).__name__}: {error}). Fetch it where "
            f"there is a network, or give --data FOLDER with {task.name}.jsonl or {task.name}.parquet in it, or leave "
            "it out: --domain-nll TASK,..."
        ) from error
