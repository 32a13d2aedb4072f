"""Whole prepares with real worker processes, read back through Megatron."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from depthbench.data.indexed import check_prefix
from depthbench.data.prepare import prepare
from depthbench.data.tokenizers import Tokenizer, load_tokenizer
from depthbench.errors import UserError
from tests.data.helpers import WRITERS, files_of, make_documents, read_back, write_jsonl


def test_every_kind_of_input_round_trips(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    inputs, expected = [], []
    for seed, (kind, writer) in enumerate(WRITERS.items()):
        (tmp_path / kind).mkdir()
        texts = make_documents(40, seed)
        inputs.append(writer(tmp_path / kind, texts))
        expected += texts[5:] + texts[:5] if kind == "txt" else texts
    (info,) = prepare(inputs, tmp_path / "out" / "c", tokenizer=hf_tokenizer.path, workers=2, unit_bytes=4000)
    assert read_back(info.prefix, hf_tokenizer) == expected
    assert info.sidecar is not None
    assert info.sidecar["characters"] == sum(map(len, expected))
    assert [Path(source["path"]).name for source in info.sidecar["sources"]][-2:] == ["a.parquet", "saved"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["c.bin", "c.idx", "c.json"]


def test_result_does_not_depend_on_workers(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(500))
    for workers in (1, 3):
        prepare([path], tmp_path / str(workers), tokenizer=hf_tokenizer.path, workers=workers, unit_bytes=5000)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")


def test_megatron_reads_the_index_as_its_own(tmp_path: Path, hf_tokenizer: Tokenizer, documents: list[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=1)
    dataset = IndexedDataset(str(tmp_path / "c"))
    lengths = [len(ids) + 1 for ids in hf_tokenizer.encode_batch(documents)]
    assert dataset.sequence_lengths.tolist() == lengths
    assert dataset.index.sequence_pointers.tolist() == [2 * sum(lengths[:i]) for i in range(len(lengths))]
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))
    assert dataset.index.dtype == np.uint16


def test_empty_documents_are_skipped_and_counted(
    tmp_path: Path, hf_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", "one", " \n", "two", ""], field="body")
    prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, text_field="body", workers=1)
    assert read_back(tmp_path / "c", hf_tokenizer) == ["one", "two"]
    assert "3 empty documents skipped" in capsys.readouterr().out
    with pytest.raises(UserError, match="all of their 3 documents are empty"):
        path = write_jsonl(tmp_path / "b.jsonl", ["", " ", "\n"])
        prepare([path], tmp_path / "d", tokenizer=hf_tokenizer.path, workers=1)


def test_eod_is_not_doubled(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x.", "y"])
    prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, eod_token=".", workers=1)
    assert read_back(tmp_path / "c", load_tokenizer(hf_tokenizer.path, ".")) == ["x", "y"]


def test_validation_split_is_disjoint_covering_and_stable(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    texts = [f"{i} {text}" for i, text in enumerate(make_documents(400))]
    path = write_jsonl(tmp_path / "a.jsonl", texts)

    def split(name: str, workers: int) -> tuple[list[str], list[str]]:
        infos = prepare(
            [path], tmp_path / name, tokenizer=hf_tokenizer.path, valid_fraction=0.1, workers=workers, unit_bytes=9000
        )
        train, valid = (read_back(info.prefix, hf_tokenizer) for info in infos)
        return train, valid

    train, valid = split("one", 1)
    assert sorted(train + valid) == sorted(texts)
    assert set(train).isdisjoint(valid)
    assert 20 <= len(valid) <= 65
    assert [text for text in texts if text in set(valid)] == valid
    assert split("two", 2) == (train, valid)


def test_a_split_without_documents_is_refused(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    with pytest.raises(UserError, match=r"--valid-fraction 1e-09 of 2 documents left valid without any"):
        prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, valid_fraction=1e-9, workers=1)
    assert not list(tmp_path.glob("c*.bin"))


def test_entropy_is_that_of_the_tokens(tmp_path: Path, hf_tokenizer: Tokenizer, documents: list[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", documents)
    (info,) = prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=2, unit_bytes=1000)
    counts = Counter(np.fromfile(tmp_path / "c.bin", np.uint16).tolist())
    expected = -sum(n / info.tokens * math.log(n / info.tokens) for n in counts.values())
    assert info.sidecar is not None
    assert info.sidecar["unigram_entropy_nats"] == pytest.approx(expected, abs=1e-12)


def test_trained_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = make_documents(300)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    prepare([path], tmp_path / "c", train_tokenizer=400, workers=1)
    tokenizer = load_tokenizer(tmp_path / "c.model")
    assert tokenizer.vocab_size == 400
    assert read_back(tmp_path / "c", tokenizer) == texts
    check_prefix(tmp_path / "c", 400, tokenizer, scan=True)
    capsys.readouterr()
    prepare([path], tmp_path / "c", train_tokenizer=400)
    assert capsys.readouterr().out.startswith("already prepared")
    (tmp_path / "d.model").write_text("the user's own")
    with pytest.raises(UserError, match=r"d\.model exists"):
        prepare([path], tmp_path / "d", train_tokenizer=400)


def test_second_run_has_nothing_to_do_and_other_data_is_not_overwritten(
    tmp_path: Path, hf_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=1)
    first = (tmp_path / "c.bin").stat().st_mtime_ns
    capsys.readouterr()
    prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=1)
    assert capsys.readouterr().out.startswith("already prepared")
    assert (tmp_path / "c.bin").stat().st_mtime_ns == first
    write_jsonl(path, ["three", "four", "five"])
    with pytest.raises(UserError, match=r"c\.bin exists .*--force"):
        prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=1)
    prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=1, force=True)
    assert read_back(tmp_path / "c", hf_tokenizer) == ["three", "four", "five"]


def test_settings_that_cannot_be(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.json", ["one"])
    model = hf_tokenizer.path
    with pytest.raises(UserError, match="either --tokenizer or --train-tokenizer"):
        prepare([path], tmp_path / "c")
    with pytest.raises(UserError, match=r"--valid-fraction is 1\.5"):
        prepare([path], tmp_path / "c", tokenizer=model, valid_fraction=1.5)
    with pytest.raises(UserError, match="--workers is 0"):
        prepare([path], tmp_path / "c", tokenizer=model, workers=0)
    with pytest.raises(UserError, match=r"a\.json is also an input"):
        prepare([path], tmp_path / "a", tokenizer=model)
    with pytest.raises(UserError, match="lies in the input folder"):
        prepare([tmp_path], tmp_path / "c", tokenizer=model)
    (tmp_path / "folder").mkdir()
    (tmp_path / "d.parts" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match=r"d\.parts is needed"):
        prepare([path], tmp_path / "d", tokenizer=model)
    with pytest.raises(UserError, match="folder is a folder"):
        prepare([path], tmp_path / "folder", tokenizer=model)
    assert json.loads(path.read_text())["text"] == "one"
