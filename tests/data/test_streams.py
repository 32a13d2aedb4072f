"""DepthBench's headerless streams, with and without their sidecars."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from depthbench.data.prepare import prepare
from depthbench.data.streams import import_stream
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError
from tests.data.helpers import make_documents, read_back, write_jsonl, write_stream


@pytest.mark.parametrize("bounds", [True, False])
def test_stream_equals_prepared_text(bounds: bool, tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    texts = make_documents(50)
    ids = [[*ids, 0] for ids in hf_tokenizer.encode_batch(texts)]
    stream = write_stream(tmp_path / "s.npy", ids, bounds)
    info = import_stream([stream], tmp_path / "c", hf_tokenizer)
    assert read_back(tmp_path / "c", hf_tokenizer) == texts
    (same,) = prepare(
        [write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "d", tokenizer=hf_tokenizer.path, workers=1
    )
    assert (tmp_path / "c.idx").read_bytes() == (tmp_path / "d.idx").read_bytes()
    assert info.sidecar is not None and same.sidecar is not None
    assert info.sidecar["unigram_entropy_nats"] == same.sidecar["unigram_entropy_nats"]
    assert info.sidecar["characters"] is None


def test_bounds_keep_an_end_token_inside_a_document(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    ids = [[5, 0, 6, 0], [0], [7, 0]]
    import_stream([write_stream(tmp_path / "s.npy", ids)], tmp_path / "c", hf_tokenizer)
    assert IndexedDataset(str(tmp_path / "c")).sequence_lengths.tolist() == [4, 1, 2]
    (tmp_path / "s.csv.gz").unlink()
    import_stream([tmp_path / "s.npy"], tmp_path / "d", hf_tokenizer)
    assert IndexedDataset(str(tmp_path / "d")).sequence_lengths.tolist() == [2, 2, 1, 2]


def test_several_streams_are_joined_in_order(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    (tmp_path / "s").mkdir()
    for i, bounds in enumerate([True, False]):
        write_stream(tmp_path / "s" / f"{i}.npy", [[10 + i, 0]] * (i + 1), bounds)
    import_stream([tmp_path / "s"], tmp_path / "c", hf_tokenizer)
    assert np.fromfile(tmp_path / "c.bin", np.uint16).tolist() == [10, 0, 11, 0, 11, 0]


def test_the_stream_outlives_what_is_later_done_to_the_output(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    stream = write_stream(tmp_path / "s.npy", [[5, 0], [6, 0]])
    content = stream.read_bytes()
    import_stream([stream], tmp_path / "c", hf_tokenizer)
    (tmp_path / "c.bin.tmp").hardlink_to(stream)  # as an import killed before its last step leaves it
    path = write_jsonl(tmp_path / "a.jsonl", ["other text"])
    prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=1, force=True)
    assert stream.read_bytes() == content


def test_second_import(tmp_path: Path, hf_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    stream = write_stream(tmp_path / "s.npy", [[5, 0]])
    import_stream([stream], tmp_path / "c", hf_tokenizer)
    import_stream([stream], tmp_path / "c", hf_tokenizer)
    assert "already prepared" in capsys.readouterr().out
    write_stream(stream, [[5, 0], [6, 0]])
    with pytest.raises(UserError, match=r"c\.bin exists .*--force"):
        import_stream([stream], tmp_path / "c", hf_tokenizer)
    assert import_stream([stream], tmp_path / "c", hf_tokenizer, force=True).documents == 2


def test_streams_that_are_none(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    np.save(tmp_path / "real.npy", np.arange(5, dtype=np.uint16))
    (tmp_path / "odd.npy").write_bytes(b"123")
    (tmp_path / "empty.npy").write_bytes(b"")
    write_stream(tmp_path / "tail.npy", [[5, 0], [6]], bounds=False)
    write_stream(tmp_path / "far.npy", [[5, 0], [9000, 0]])
    write_stream(tmp_path / "open.npy", [[5, 0], [6], [7, 0]])
    for name, message in (
        ("none.npy", "no stream at"),
        ("real.npy", r"real\.npy is a real NumPy file"),
        ("odd.npy", "has 3 bytes, which is no positive multiple of 2"),
        ("empty.npy", "has 0 bytes"),
        ("tail.npy", r"tail\.npy does not end in the end-of-document id 0 .*occurs 1 times in 3 tokens"),
        ("far.npy", "document 1 has id 9000"),
        ("open.npy", "document 1 does not end in the end-of-document id 0"),
    ):
        with pytest.raises(UserError, match=message):
            import_stream([tmp_path / name], tmp_path / "c", hf_tokenizer)
    with pytest.raises(UserError, match="named twice"):
        import_stream([tmp_path / "far.npy"] * 2, tmp_path / "c", hf_tokenizer)
    assert not (tmp_path / "c.bin").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,2\n3,5\n", r"csv\.gz line 2: document 3,5 does not follow"),
        ("1,2\n2,5\n", r"csv\.gz line 1: document 1,2 does not follow"),
        ("0,2\n2,2\n2,5\n", r"csv\.gz line 2"),
        ("0,2\n2,4\n", "ends at token 4, but its stream has 5"),
        ("", "ends at token 0, but its stream has 5"),
        ("zero,two\n", "is no list of start,end lines"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_bad_bounds(lines: str, message: str, tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    stream = write_stream(tmp_path / "s.npy", [[5, 0], [6, 7, 0]], bounds=False)
    (tmp_path / "s.csv.gz").write_bytes(gzip.compress(lines.encode()))
    with pytest.raises(UserError, match=message):
        import_stream([stream], tmp_path / "c", hf_tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "uint32"}, "dtype = uint32, but the import needs uint16"),
        ({"eos_token_id": 7}, "eos_token_id = 7, but the import needs 0"),
        ({"num_tokens": 9}, "num_tokens = 9, but the import needs 2"),
    ],
)
def test_meta_that_disagrees(change: dict[str, object], message: str, tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    stream = write_stream(tmp_path / "s.npy", [[5, 0]])
    meta = tmp_path / "s.meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        import_stream([stream], tmp_path / "c", hf_tokenizer)
