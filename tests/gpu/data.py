"""Random token data that needs no network: a word-level tokenizer and documents of skewed random ids."""

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_data(folder: Path, vocab: int, tokens: int) -> tuple[Path, Path]:
    """`tokens` ids below `vocab` in documents of 200 to 1800, rank r as often as 1 / (r + 10).

    Returns the tokenizer.json and the prefix.
    """
    words = {"<|endoftext|>": 0, "<|padding|>": 1, **{f"w{number}": number for number in range(2, vocab)}}
    model = tokenizers.models.WordLevel(words, unk_token="<|padding|>")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    generator = np.random.default_rng(0)
    shares = 1 / np.arange(10, vocab + 8)
    ids = 2 + generator.choice(vocab - 2, tokens, p=shares / shares.sum())
    prefix = folder / "random"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16 if vocab < 65500 else np.int32)
    start = 0
    while start < tokens:
        stop = min(tokens, start + int(generator.integers(200, 1800)))
        builder.add_document(torch.from_numpy(np.append(ids[start : stop - 1], 0)), [stop - start])
        start = stop
    builder.finalize(f"{prefix}.idx")
    assert len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) == vocab
    return folder / "tokenizer.json", prefix
