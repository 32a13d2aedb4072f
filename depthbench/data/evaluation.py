"""Validation sets of a fixed order: stream windows, or documents from their start (the DepthBench paper's form)."""

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset

from .corpus import EpochedCorpus
from .loader import Batch


class FirstEpoch(Dataset[Batch]):
    """The windows of a corpus's first epoch."""

    def __init__(self, corpus: EpochedCorpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return self.corpus.samples_per_epoch

    def __getitem__(self, index: int) -> Batch:
        return self.corpus[index]


class AlignedDocuments(Dataset[Batch]):
    """One document an instance: its first S + 1 tokens, the rest dropped, a short one padded and its padding masked."""

    def __init__(self, corpus: EpochedCorpus) -> None:
        self.corpus = corpus

    def __len__(self) -> int:
        return len(self.corpus.documents)

    def __getitem__(self, index: int) -> Batch:
        length = self.corpus.settings.sequence_length
        number = int(self.corpus.documents[index])
        size = min(int(self.corpus.indexed.sequence_lengths[number]), length + 1)
        padded = np.zeros(length + 1, dtype=np.int64)
        padded[:size] = self.corpus.indexed.get(number, length=size)
        text = torch.from_numpy(padded)
        mask = (torch.arange(length) < size - 1).to(torch.float32)
        return {"tokens": text[:-1], "labels": text[1:] * mask.to(torch.int64), "loss_mask": mask}


class PaddedSet(Dataset[Batch]):
    """The first `count` items of a set, then fully masked copies of item 0, so that any batch size divides it."""

    def __init__(self, items: Dataset[Batch], count: int) -> None:
        self.items, self.count = items, count

    def __getitem__(self, index: int) -> Batch:
        if index < self.count:
            return self.items[index]
        return {**self.items[0], "loss_mask": torch.zeros_like(self.items[0]["loss_mask"])}


def evaluation_set(corpora: list[EpochedCorpus], by_document: bool, limit: int | None) -> PaddedSet:
    """All corpora one after the other, or every k-th instance of them where `limit` asks for fewer."""
    form = AlignedDocuments if by_document else FirstEpoch
    items: Dataset[Batch] = ConcatDataset([form(corpus) for corpus in corpora])
    total = len(items)  # type: ignore[arg-type]
    if limit is not None and limit < total:
        items = torch.utils.data.Subset(items, np.linspace(0, total, limit, endpoint=False, dtype=np.int64).tolist())
        total = limit
    return PaddedSet(items, total)
