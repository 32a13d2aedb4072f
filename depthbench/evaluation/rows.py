"""The rows of a domain task: from a local file or folder of its name, or from the hub."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from depthbench.errors import UserError

from .domain import DomainTask, Row

_SUFFIXES = (".jsonl", ".parquet", "")  # none: a folder that `datasets` saved


@dataclass(frozen=True)
class TaskRows:
    """place: the file, or the hub's name. rows: with all fields that the task needs."""

    task: DomainTask
    place: str
    rows: list[Row]


def read_sets(tasks: list[DomainTask], folder: Path | None, limit: int | None) -> list[TaskRows]:
    """The first `limit` rows of each task, from its file under `folder`, or from the hub where that is None.

    Raises UserError for a set that cannot be had or read, that is empty, or that has a row without a field.
    """
    sources = _find(folder, tasks) if folder else dict.fromkeys(task.name for task in tasks)
    return [_read(task, sources[task.name], limit) for task in tasks]


def _find(folder: Path, tasks: list[DomainTask]) -> dict[str, Path | None]:
    """Each task's file. Raises UserError naming every task that has none, and what was looked for."""
    if not folder.is_dir():
        raise UserError(f"--data={folder} is no folder")
    places = {task.name: [folder / f"{task.name}{suffix}" for suffix in _SUFFIXES] for task in tasks}
    found = {name: next((path for path in paths if path.exists()), None) for name, paths in places.items()}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        looked = "; ".join(f"{name}: {', '.join(path.name for path in places[name])}" for name in missing)
        have = ",".join(name for name in found if name not in missing)
        rest = f", or give --domain-nll {have}" if have else ""
        raise UserError(f"{folder} lacks {len(missing)} of {len(tasks)} tasks (looked for {looked}); add them{rest}")
    return found


def _read(task: DomainTask, source: Path | None, limit: int | None) -> TaskRows:
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
    return TaskRows(task, place, rows)


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
