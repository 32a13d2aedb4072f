"""Corpora that tests train on: real English that the product prepared, and small ones whose tokens count."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from depthbench.config.load import typed
from depthbench.config.schema import RunConfig
from depthbench.data.prepare import prepare

VOCAB = 512


@dataclass(frozen=True)
class Corpus:
    """A tokenizer and the prefixes of what was prepared with it."""

    tokenizer: str
    train: str
    valid: str


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The Python reference's help topics, a document each: 72 to train on, 7 to validate on, 512 pieces."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = (json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics))
    (folder / "topics.jsonl").write_text("".join(lines))
    prepare([folder / "topics.jsonl"], folder / "topics", train_tokenizer=VOCAB, valid_fraction=0.1, workers=1)
    return Corpus(f"{folder}/topics.model", f"{folder}/topics_train", f"{folder}/topics_valid")


def trainable_run(corpus: Corpus, folder: Path, **sections: Any) -> RunConfig:
    """A run of a tiny model on `corpus` in `folder`; `sections` are merged over it, section by section."""
    base: dict[str, Any] = {
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 2,
            "vocab_size": VOCAB,
            "sequence_length": 32,
        },
        "parallel": {"distributed_optimizer": False},
        "data": {
            "train": [{"prefix": corpus.train}],
            "valid": [{"prefix": corpus.valid}],
            "tokenizer": corpus.tokenizer,
            "workers": 0,
        },
        "optimizer": {"lr": 1e-3},
        "train": {
            "steps": 4,
            "global_batch": 4,
            "micro_batch": 2,
            "precision": "fp32",
            "eval_every": 2,
            "eval_sequences": 8,
        },
        "checkpoint": {"every": 2},
        "log": {"tensorboard": True},
    }
    residual = sections.pop("residual", {"architecture": "block_attnres", "sublayers_per_block": 2})
    settings = {name: {**values, **sections.pop(name, {})} for name, values in base.items()}
    return typed({"name": "tiny", "run_dir": str(folder), **settings, "residual": residual, **sections})


def write_documents(prefix: str | Path, documents: list[list[int]]) -> str:
    """A token file without a sidecar, as Megatron's own tools write it."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_counting(prefix: str | Path, lengths: list[int], first: int = 0) -> str:
    """Documents of `lengths` tokens that count on from `first`, so that each token of the corpus is another."""
    ends = np.cumsum([first, *lengths]).tolist()
    return write_documents(prefix, [list(range(a, b)) for a, b in pairwise(ends)])


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under `folder` with its content, and every folder."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in paths}
