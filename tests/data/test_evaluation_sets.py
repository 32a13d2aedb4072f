"""Validation sets against what the token files hold, and their independence of layout."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from depthbench.data.corpus import EpochedCorpus, WindowSettings, documents_of
from depthbench.data.evaluation import evaluation_set
from depthbench.data.loader import Batch, SampleOrder, batches
from tests.corpora import Corpus, write_counting

LENGTH = 8
LENGTHS = [31, 5, 1, 12, 9, 10, 2, 8]  # 78 tokens
WINDOWS = 9


def opened(prefix: str, cache: Path, fraction: float = 0.0, length: int = LENGTH) -> EpochedCorpus:
    settings = WindowSettings(length, 1000, 0, 3, cache)
    documents = documents_of(prefix, fraction)[1 if fraction else 0]
    found = EpochedCorpus(prefix, documents, Split.valid, settings)
    found.build_index(1)
    return found


@pytest.fixture
def counting(tmp_path: Path) -> EpochedCorpus:
    return opened(write_counting(tmp_path / "counting", LENGTHS, first=100), tmp_path / "cache")


def text_of(item: Batch) -> list[int]:
    """The tokens that count, and the label after them."""
    size = int(item["loss_mask"].sum())
    assert item["loss_mask"].tolist() == [1.0] * size + [0.0] * (len(item["loss_mask"]) - size)
    assert torch.equal(item["labels"][: max(size - 1, 0)], item["tokens"][1 : max(size, 1)])
    return [*item["tokens"][:size].tolist(), *item["labels"][size - 1 : size].tolist()]


def test_windows_are_the_first_epoch(corpus: Corpus, tmp_path: Path) -> None:
    found = opened(corpus.valid, tmp_path, length=32)
    items = evaluation_set([found], by_document=False, limit=None)
    indexed = IndexedDataset(corpus.valid)
    text = np.concatenate([indexed[n] for n in found._epoch(0, found._cache).document_index])
    expected = [text[start : start + 33].tolist() for start in range(0, len(text) - 32, 32)]
    assert items.count == len(expected) == (sum(map(len, indexed)) - 1) // 32
    assert sorted(text_of(items[n]) for n in range(items.count)) == sorted(expected)


def test_documents_begin_at_their_start(corpus: Corpus, tmp_path: Path) -> None:
    length = 2000  # some of the seven are shorter, some longer
    found = opened(corpus.valid, tmp_path, length=length)
    items = evaluation_set([found], by_document=True, limit=None)
    indexed = IndexedDataset(corpus.valid)
    assert items.count == len(indexed)
    cut = 0
    for number in range(items.count):
        item, document = items[number], indexed[number]
        assert text_of(item) == document[: length + 1].tolist()
        assert item["tokens"].shape == item["labels"].shape == item["loss_mask"].shape == (length,)
        cut += len(document) > length
    assert 0 < cut < items.count


def test_padding_is_masked(counting: EpochedCorpus) -> None:
    items = evaluation_set([counting], by_document=True, limit=None)
    assert [int(items[n]["loss_mask"].sum()) for n in range(items.count)] == [min(n - 1, LENGTH) for n in LENGTHS]
    for number in range(items.count):
        item = items[number]
        masked = item["loss_mask"] == 0
        assert bool((item["labels"][masked] == 0).all())
        assert bool((item["tokens"][1:][masked[:-1]] == 0).all())
    for beyond in (items.count, items.count + 5):  # to fill the last round of microbatches
        assert bool((items[beyond]["loss_mask"] == 0).all())


def test_held_out_documents(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "counting", LENGTHS)
    items = evaluation_set([opened(prefix, tmp_path / "cache", fraction=0.5)], by_document=True, limit=None)
    starts = np.cumsum([0, *LENGTHS])[4:-1].tolist()
    assert [int(items[n]["tokens"][0]) for n in range(items.count)] == starts


@pytest.mark.parametrize("by_document", [True, False])
def test_all_corpora_one_after_the_other(counting: EpochedCorpus, tmp_path: Path, by_document: bool) -> None:
    other = opened(write_counting(tmp_path / "other", [40, 40, 40], first=500), tmp_path / "cache")
    items = evaluation_set([counting, other], by_document, limit=None)
    first = len(LENGTHS) if by_document else WINDOWS
    assert items.count == first + (3 if by_document else 14)
    assert [int(items[n]["tokens"][0]) >= 500 for n in range(items.count)] == [n >= first for n in range(items.count)]


@pytest.mark.parametrize("by_document", [True, False])
def test_a_limit_picks_evenly(counting: EpochedCorpus, by_document: bool) -> None:
    everything = evaluation_set([counting], by_document, limit=None)
    for limit in range(1, everything.count + 3):
        some = evaluation_set([counting], by_document, limit)
        assert some.count == min(limit, everything.count)
        texts = [text_of(everything[n]) for n in range(everything.count)]
        picked = [texts.index(text_of(some[n])) for n in range(some.count)]
        steps = {b - a for a, b in pairwise([*picked, everything.count])}
        assert picked[0] == 0
        assert min(steps) >= 1 and max(steps) - min(steps) <= 1


@pytest.mark.parametrize("by_document", [True, False])
def test_totals_do_not_depend_on_the_layout(counting: EpochedCorpus, by_document: bool) -> None:
    items = evaluation_set([counting], by_document, limit=None)
    single = [items[n] for n in range(items.count)]
    tokens = sum(int(item["loss_mask"].sum()) for item in single)
    labels = sum(int((item["labels"] * item["loss_mask"]).sum()) for item in single)
    for dp_size in (1, 2, 4):
        for micro_batch in (1, 2, 3, 16):
            stride = dp_size * micro_batch
            end = -(-items.count // stride) * stride
            seen = [0, 0]
            for dp_rank in range(dp_size):
                for batch in batches(items, SampleOrder(0, end, micro_batch, dp_rank, dp_size), 0):
                    seen[0] += int(batch["loss_mask"].sum())
                    seen[1] += int((batch["labels"] * batch["loss_mask"]).sum())
            assert seen == [tokens, labels], (dp_size, micro_batch)
