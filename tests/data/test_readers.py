"""Inputs of every kind: expansion, cutting into units, streaming, and the errors a user can meet."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from depthbench.data.readers import read_unit
from depthbench.data.sources import find_sources, plan_units, unit_name
from depthbench.errors import UserError
from tests.data.helpers import WRITERS, write_dataset, write_gz, write_jsonl, write_parquet, write_txt, write_zst


def read(*inputs: str | Path, field: str = "text", unit_bytes: int = 1000, split: str | None = None) -> list[str]:
    units = plan_units(find_sources(inputs, hf_split=split), field, unit_bytes)
    return [text for unit in units for text in read_unit(unit, field)]


@pytest.mark.parametrize("kind", WRITERS)
def test_documents_come_whole_and_in_order(kind: str, tmp_path: Path, documents: list[str]) -> None:
    path = WRITERS[kind](tmp_path, documents)
    expected = documents[5:] + documents[:5] if kind == "txt" else documents  # digits sort before "deep"
    for unit_bytes in (1, 100, 1000, 1 << 30):
        assert read(path, unit_bytes=unit_bytes) == expected


def test_jsonl_ranges_of_every_size_lose_and_repeat_nothing(tmp_path: Path) -> None:
    texts = ["", "a", "bb" * 7, "", "ccc" * 30, "d"]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n", 2).rstrip(b"\n"))  # blank lines, no final newline
    for unit_bytes in range(1, path.stat().st_size + 2):
        assert read(path, unit_bytes=unit_bytes) == texts


def test_a_big_file_becomes_many_units_and_small_files_share_one(tmp_path: Path, documents: list[str]) -> None:
    big = write_jsonl(tmp_path / "big.jsonl", documents)
    units = plan_units(find_sources([big]), "text", 500)
    assert len(units) == -(-big.stat().st_size // 500)
    assert "bytes 500 to 1000" in unit_name(units[1])
    small = plan_units(find_sources([write_txt(tmp_path, ["one", "two", "three"])]), "text", 500)
    assert len(small) == 1
    assert "and 2 more pieces" in unit_name(small[0])


def test_folders_and_globs_expand_sorted(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [name])
    (tmp_path / "README.md").write_text("no input")
    assert read(tmp_path) == read(f"{tmp_path}/*.jsonl") == ["a", "b", "c"]
    assert read(tmp_path / "c.jsonl", tmp_path / "a.jsonl") == ["c", "a"]


def test_data_set_with_splits(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")
    assert read(tmp_path / "d") == ["train"]
    assert read(tmp_path / "d", split="test") == ["test"]
    with pytest.raises(UserError, match=r"no split 'dev'.*train, test"):
        read(tmp_path / "d", split="dev")
    with pytest.raises(UserError, match="saved without splits"):
        read(write_dataset(tmp_path, ["x"]), split="train")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffword".encode())
    assert read(tmp_path / "a.txt") == ["word"]


LINE = json.dumps({"text": "fine"}).encode() + b"\n"
BAD_LINES = [
    (b"{'text': 1}\n", "line 41: not JSON"),
    (b"[" * 100_000 + b"\n", "line 41: not JSON"),
    (b'["text"]\n', "line 41: a JSON list"),
    (b'{"body": "x"}\n', r"line 41: no field 'text'; it has 'body'\. See --field"),
    (b'{"text": null}\n', "line 41: field 'text' is null, not a string"),
    (b'{"text": 3}\n', "line 41: field 'text' is a int, not a string"),
    (b'{"text": "\xff"}\n', "line 41: invalid UTF-8 at byte 10"),
    (b'{"text": "\\ud83d"}\n', "line 41: field 'text' has half a surrogate pair"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
@pytest.mark.parametrize("compress", [False, True])
def test_a_bad_line_is_named(line: bytes, message: str, compress: bool, tmp_path: Path) -> None:
    content = LINE * 40 + line + LINE
    path = tmp_path / ("a.jsonl.gz" if compress else "a.jsonl")
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(UserError, match=f"{path.name} {message}"):
        read(path, unit_bytes=100)


@pytest.mark.parametrize("writer", [write_gz, write_zst])
def test_damaged_compression(writer: Callable[[Path, list[str]], Path], tmp_path: Path, documents: list[str]) -> None:
    path = writer(tmp_path, documents)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=rf"{path.name} is damaged after line \d+: Truncated"):
        read(path)
    path.write_bytes(b"not compressed at all")
    with pytest.raises(UserError, match=f"{path.name} is damaged after line 0"):
        read(path)


def test_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for column, message in (
        (pa.array(["a", None, "b"]), "row 1: field 'text' is null"),
        (pa.array([1, 2, 3]), "row 0: field 'text' is a int"),
        (pa.array([b"a", b"b", b"\xff"]).view(pa.string()), "row 2: invalid UTF-8"),
    ):
        pq.write_table(pa.table({"text": column}), path, row_group_size=1)
        with pytest.raises(UserError, match=rf"a\.parquet {message}"):
            read(path)
    saved = datasets.Dataset.from_dict({"text": ["a"] * 100 + [None]})
    saved.save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match=r"saved row 100: field 'text' is null"):
        read(tmp_path / "saved")


def test_missing_columns_and_damaged_tables(tmp_path: Path) -> None:
    for path in (write_parquet(tmp_path, ["x"]), write_dataset(tmp_path, ["x"])):
        with pytest.raises(UserError, match=r"no field 'body': choose --field from"):
            read(path, field="body")
    parquet = tmp_path / "a.parquet"
    parquet.write_bytes(parquet.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as Parquet"):
        read(parquet)
    write_parquet(tmp_path, ["x" * 50] * 50)
    content = bytearray(parquet.read_bytes())
    content[4:40] = b"\xff" * 36
    parquet.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet is damaged in row groups 0 to"):
        read(parquet)


def test_text_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xff")
    with pytest.raises(UserError, match=r"a\.txt: invalid UTF-8 at byte 3"):
        read(path)
    monkeypatch.setattr("depthbench.data.readers._MAX_TEXT_FILE_BYTES", 3)
    with pytest.raises(UserError, match=r"has 4 bytes, .* at most 3"):
        read(path)


def test_inputs_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.csv").write_text("x")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for name, message in (
        ("empty", "holds no input"),
        ("missing.jsonl", r"missing\.jsonl does not exist"),
        ("missing", "missing does not exist"),
        ("*.zst", "no file matches"),
        ("a.jsonl", "is empty"),
        ("b.csv", "is of no known kind"),
        ("none.parquet", "have no rows"),
    ):
        with pytest.raises(UserError, match=message):
            read(f"{tmp_path}/{name}")
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(UserError, match="named twice"):
        read(tmp_path / "a.jsonl", f"{tmp_path}/*.jsonl")


def test_a_hub_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(name: str, config: str | None) -> None:
        raise ConnectionError(f"cannot reach {name} {config}")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"neither an existing path nor a data set.*cannot reach nobody/none None"):
        read("nobody/none")
