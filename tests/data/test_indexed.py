"""Checks of prepared files: what is accepted, and each thing that is refused."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from depthbench.data.indexed import check_prefix
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError

VOCAB = 512


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Three documents of 3, 4 and 2 tokens as Megatron's own tools write them; the second has two sequences."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/c.bin", dtype=np.uint16)
    builder.add_document(torch.tensor([1, 2, 0]), [3])
    builder.add_document(torch.tensor([3, 4, 500, 0]), [2, 2])
    builder.add_document(torch.tensor([5, 0]), [2])
    builder.finalize(f"{tmp_path}/c.idx")
    return tmp_path / "c"


def write_sidecar(prefix: Path, vocab_size: int, fingerprint: str) -> None:
    tokenizer = {"path": "/there/tokenizer.json", "fingerprint": fingerprint}
    Path(f"{prefix}.json").write_text(
        json.dumps({"vocab_size": vocab_size, "tokenizer": tokenizer, "settings": "0123"})
    )


def test_what_is_found(prefix: Path) -> None:
    info = check_prefix(prefix, VOCAB, scan=True)
    assert (info.documents, info.tokens, info.dtype.name, info.sidecar) == (3, 9, "uint16", None)
    assert check_prefix(prefix, None).tokens == 9


def test_missing_files(prefix: Path) -> None:
    with pytest.raises(UserError, match=r"d\.idx does not exist"):
        check_prefix(prefix.with_name("d"), VOCAB)
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(UserError, match=r"c\.bin does not exist"):
        check_prefix(prefix, VOCAB)


def test_foreign_and_broken_indices(prefix: Path) -> None:
    idx = Path(f"{prefix}.idx")
    good = idx.read_bytes()
    for content, message in (
        (b"TNTIDX\x00\x00" + good[8:], "is no Megatron index: it begins with b'TNTIDX"),
        (b"", "is no Megatron index"),
        (good[:20], "is truncated: 20 bytes, less than the header's 34"),
        (good[:9] + struct.pack("<Q", 2) + good[17:], "of version 2; only version 1"),
        (good[:17] + b"\x63" + good[18:], "unknown dtype code 99"),
        (good[:17] + b"\x07" + good[18:], "holds float32 values"),
        (good[:-8], f"has {len(good) - 8} bytes but its header says {len(good)}"),
    ):
        idx.write_bytes(content)
        with pytest.raises(UserError, match=message):
            check_prefix(prefix, VOCAB)


def test_truncated_data(prefix: Path) -> None:
    Path(f"{prefix}.bin").write_bytes(b"12345")
    with pytest.raises(UserError, match=r"has 5 bytes but its index says 18 \(9 tokens of 2 bytes\)"):
        check_prefix(prefix, VOCAB)


def test_no_document(tmp_path: Path) -> None:
    IndexedDatasetBuilder(f"{tmp_path}/c.bin", dtype=np.uint16).finalize(f"{tmp_path}/c.idx")
    with pytest.raises(UserError, match="holds no document"):
        check_prefix(tmp_path / "c", VOCAB)


def test_vocabulary(prefix: Path) -> None:
    assert check_prefix(prefix, 1 << 16).tokens == 9
    with pytest.raises(UserError, match="uint16 ids up to 65535, too small for the vocabulary of 65537"):
        check_prefix(prefix, (1 << 16) + 1)
    with pytest.raises(UserError, match=r"document 1 has id 500 \(token 5\), outside the vocabulary of 400"):
        check_prefix(prefix, 400, scan=True)
    write_sidecar(prefix, 600, "ab")
    with pytest.raises(UserError, match=r"/there/tokenizer.json, of 600 ids, more than .* 512"):
        check_prefix(prefix, VOCAB)


def test_tokenizer(prefix: Path, hf_tokenizer: Tokenizer) -> None:
    write_sidecar(prefix, 500, hf_tokenizer.fingerprint)
    assert check_prefix(prefix, VOCAB, hf_tokenizer).sidecar is not None
    write_sidecar(prefix, 500, "feed")
    with pytest.raises(UserError, match=rf"/there/tokenizer.json \(feed\).*{hf_tokenizer.path}"):
        check_prefix(prefix, VOCAB, hf_tokenizer)


@pytest.mark.parametrize("content", ["{", "[]", '{"tokenizer": 1}'])
def test_a_foreign_sidecar(content: str, prefix: Path) -> None:
    Path(f"{prefix}.json").write_text(content)
    with pytest.raises(UserError, match=r"c\.json is not what depthbench prepare writes"):
        check_prefix(prefix, VOCAB)
