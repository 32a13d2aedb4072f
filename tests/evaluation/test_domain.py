"""What each domain task gives and scores, and how its rows are found, read and refused."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from depthbench.errors import UserError
from depthbench.evaluation.domain import TASKS
from depthbench.evaluation.rows import read_sets

from .sets import PAIRS, ROWS, write_jsonl, write_sets


@pytest.mark.parametrize("name", TASKS)
def test_contexts_and_targets(name: str) -> None:
    assert [TASKS[name].pair(row) for row in ROWS[name]] == PAIRS[name]


def test_two_tasks_a_category() -> None:
    found: dict[str, list[str]] = {}
    for task in TASKS.values():
        found.setdefault(task.category, []).append(task.name)
    assert found == {"coding": ["mbpp", "humaneval"], "stem": ["sciq", "gpqa_diamond"], "math": ["gsm8k", "math500"]}


def read(folder: Path, *names: str, limit: int | None = None) -> list[list[dict[str, Any]]]:
    return [found.rows for found in read_sets([TASKS[name] for name in names or TASKS], folder, limit)]


def test_every_kind_of_file(tmp_path: Path) -> None:
    """JSON lines, Parquet, and what `datasets` saves, with splits and without."""
    data = write_sets(tmp_path / "data")
    assert read(data) == list(ROWS.values())
    (data / "sciq.jsonl").unlink()
    pq.write_table(pa.Table.from_pylist(ROWS["sciq"]), data / "sciq.parquet")
    (data / "gsm8k.jsonl").unlink()
    datasets.Dataset.from_list(ROWS["gsm8k"]).save_to_disk(data / "gsm8k")
    (data / "mbpp.jsonl").unlink()
    splits = {"test": datasets.Dataset.from_list(ROWS["mbpp"][1:]), "train": datasets.Dataset.from_list(ROWS["mbpp"])}
    datasets.DatasetDict(splits).save_to_disk(data / "mbpp")
    assert read(data) == [ROWS["mbpp"][1:], *list(ROWS.values())[1:]]
    assert read(data, "sciq", limit=1) == [ROWS["sciq"][:1]]
    datasets.DatasetDict({"train": splits["train"]}).save_to_disk(data / "humaneval_folder")
    (data / "humaneval.jsonl").unlink()
    (data / "humaneval_folder").rename(data / "humaneval")
    with pytest.raises(UserError, match="has no split 'test', only train"):
        read(data, "humaneval")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is no folder"):
        read(tmp_path / "nowhere")
    data = write_sets(tmp_path / "data")
    for name in ("gpqa_diamond", "gsm8k"):
        (data / f"{name}.jsonl").unlink()
    with pytest.raises(UserError) as refused:
        read(data)
    for part in (
        "lacks 2 of 6 tasks",
        "gpqa_diamond: gpqa_diamond.jsonl, gpqa_diamond.parquet, gpqa_diamond",
        "gsm8k: gsm8k.jsonl",
        "--domain-nll mbpp,humaneval,sciq,math500",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sciq.jsonl has no rows"),
        ("\n\n", "sciq.jsonl has no rows"),
        ("{}\n[1]\n", "line 2: a JSON list where an object is needed"),
        ('{"question": "', "line 1: not JSON"),
        ("\udcff", "cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sciq.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=message):
        read(tmp_path, "sciq")


def test_bad_folders_and_tables(tmp_path: Path) -> None:
    (tmp_path / "sciq").mkdir()
    with pytest.raises(UserError, match="sciq is no data set that `datasets` saved"):
        read(tmp_path, "sciq")
    (tmp_path / "gsm8k.parquet").write_text("no table")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        read(tmp_path, "gsm8k")


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("sciq", "support", None, "'support' as NoneType"),
        ("mbpp", "test_list", "assert True", "'test_list' as str"),
        ("gsm8k", "answer", 4, "'answer' as int"),
        ("math500", "solution", ..., "no field 'solution'"),
    ],
)
def test_a_row_that_lacks_a_field(tmp_path: Path, name: str, field: str, value: Any, said: str) -> None:
    broken = {key: value if key == field else held for key, held in ROWS[name][0].items()}
    if value is ...:
        del broken[field]
    write_jsonl(tmp_path / f"{name}.jsonl", [*ROWS[name], broken])
    with pytest.raises(UserError) as refused:
        read(tmp_path, name)
    needed = ", ".join(TASKS[name].fields)
    assert f"row {len(ROWS[name])} has {said}; {name} needs {needed}" in str(refused.value)
    assert read(tmp_path, name, limit=1) == [ROWS[name][:1]]
    assert json.loads((tmp_path / f"{name}.jsonl").read_text().split("\n")[0]) == ROWS[name][0]
