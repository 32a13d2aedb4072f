"""Documents and the files that hold them, in every kind that prepare reads."""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset

from depthbench.data.tokenizers import Tokenizer

HARD_TEXTS = [
    "two  spaces   and three\n\n\nthree newlines, a tab\tand \r\n an end  ",
    "naïve café, 日本語のテキスト, emoji 😀👩‍👩‍👧, Ελληνικά",
    " leading space",
    "\n",
    "looks like <|endoftext|> and </s> but is text</s>",
    "null \x00 and line separator \u2028 end",
]


def make_documents(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` documents of 1 to 60 words, with the hard texts that are no mere space among the first."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(1, 9))) for _ in range(300)]
    documents = [text for text in HARD_TEXTS if not text.isspace()]
    while len(documents) < count:
        documents.append(" ".join(rng.choices(words, k=rng.randint(1, 60))) + rng.choice(["", ".", "\n", "\n\n"]))
    return documents[:count]


def write_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    lines = (json.dumps({"id": i, field: text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(documents))
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="")
    return path


def read_back(prefix: str | Path, tokenizer: Tokenizer) -> list[str]:
    """Return the documents' texts as Megatron reads them, having checked that each ends in its only eod."""
    dataset = IndexedDataset(str(prefix))
    texts = []
    for i in range(len(dataset)):
        ids = dataset[i].tolist()
        assert ids[-1] == tokenizer.eod
        assert ids.count(tokenizer.eod) == 1
        texts.append(tokenizer.decode(ids[:-1]))
    return texts


def files_of(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def write_txt(folder: Path, documents: list[str]) -> Path:
    (folder / "texts" / "deep").mkdir(parents=True)
    for i, text in enumerate(documents):
        (folder / "texts" / ("deep" if i < 5 else "") / f"{i:04d}.txt").write_bytes(text.encode())
    return folder / "texts"


def write_gz(folder: Path, documents: list[str]) -> Path:
    lines = write_jsonl(folder / "plain", documents).read_bytes().splitlines(keepends=True)
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(lines[:20])) + gzip.compress(b"".join(lines[20:])))  # two members
    return path


def write_zst(folder: Path, documents: list[str]) -> Path:
    lines = write_jsonl(folder / "plain", documents).read_bytes().splitlines(keepends=True)
    compress = zstandard.ZstdCompressor().compress
    path = folder / "a.jsonl.zst"
    path.write_bytes(compress(b"".join(lines[:20])) + compress(b"".join(lines[20:])))  # two frames
    return path


def write_parquet(folder: Path, documents: list[str]) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"text": documents, "n": list(range(len(documents)))}), path, row_group_size=7)
    return path


def write_dataset(folder: Path, documents: list[str]) -> Path:
    datasets.Dataset.from_dict({"n": list(range(len(documents))), "text": documents}).save_to_disk(folder / "saved")
    return folder / "saved"


WRITERS: dict[str, Callable[[Path, list[str]], Path]] = {
    "txt": write_txt,
    "jsonl": lambda folder, documents: write_jsonl(folder / "a.jsonl", documents),
    "json": lambda folder, documents: write_jsonl(folder / "a.json", documents),
    "gz": write_gz,
    "zst": write_zst,
    "parquet": write_parquet,
    "dataset": write_dataset,
}


def write_stream(path: Path, documents: list[list[int]], bounds: bool = True, meta: bool = True) -> Path:
    np.concatenate(documents).astype("<u2").tofile(path)
    ends = np.cumsum([len(d) for d in documents])
    if bounds:
        with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
            file.writelines(f"{end - len(d)},{end}\n" for d, end in zip(documents, ends, strict=True))
    if meta:
        content = {"dtype": "uint16", "eos_token_id": 0, "num_tokens": int(ends[-1]), "num_documents": len(documents)}
        path.with_suffix(".meta.json").write_text(json.dumps(content))
    return path
