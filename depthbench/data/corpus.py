"""Prepared corpora as Megatron-Core datasets whose order never depends on how long, or how wide, a run is.

Megatron's `GPTDataset` shuffles all the epochs it is asked for together, so its order changes with `train.steps`. Here
each epoch is a one-epoch `GPTDataset` with a seed of its own, and sample j of a corpus is sample j mod n of epoch
j // n: every entry of an epoch's sample index is used exactly once, and a longer run continues the same order.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from depthbench.config.schema import DataConfig
from depthbench.errors import UserError


@dataclass(frozen=True)
class IndexIdentity:
    """What Megatron asks of a tokenizer: the fields that its sample index depends on. Windows cross document borders,
    so no id has a meaning here."""

    vocab_size: int
    eod: int

    @property
    def unique_identifiers(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size, "eod": self.eod}


@dataclass(frozen=True)
class WindowSettings:
    """Everything that a corpus's windows depend on besides its documents."""

    sequence_length: int
    vocab_size: int
    eod: int
    seed: int
    index_cache: Path


class EpochedCorpus(Dataset[dict[str, torch.Tensor]]):
    """Endless windows of `sequence_length` + 1 tokens over documents of a corpus, one shuffled epoch after another.

    Each item: `tokens` and `labels` [S] int64, `loss_mask` [S] float32. The last, incomplete window of an epoch is
    dropped. `index_split` and `unique_identifiers` are what Megatron's `BlendedDataset` reads.
    """

    def __init__(self, prefix: str, documents: np.ndarray, split: Split, settings: WindowSettings) -> None:
        self.prefix, self.documents, self.index_split, self.settings = prefix, documents, split, settings
        self.indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
        tokens = int(self.indexed.sequence_lengths[documents].sum())
        self.samples_per_epoch = (tokens - 1) // settings.sequence_length
        if self.samples_per_epoch < 1:
            raise UserError(
                f"the {split.name} split of {prefix} has {tokens} tokens in {len(documents)} documents, too few for "
                f"one window of model.sequence_length={settings.sequence_length} + 1; give it more documents"
            )
        self._epochs: dict[int, GPTDataset] = {}

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "documents": len(self.documents), "seed": self.settings.seed}

    def __len__(self) -> int:
        return 2**62  # BlendedDataset only asks whether there are enough

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, sample = divmod(int(index), self.samples_per_epoch)
        if epoch not in self._epochs:
            self._epochs = {epoch: self._epoch(epoch, self._cache)}  # samples come in order: one epoch at a time
        return self._epochs[epoch][sample]

    def _epoch(self, epoch: int, cache: Path) -> GPTDataset:
        """Epoch `epoch`; Megatron reads its sample index from `cache`, or builds it there where it may."""
        settings = self.settings
        config = GPTDatasetConfig(
            random_seed=_epoch_seed(settings.seed, epoch),
            sequence_length=settings.sequence_length,
            blend=([self.prefix], None),
            split="1",
            path_to_cache=str(cache),
            tokenizer=IndexIdentity(settings.vocab_size, settings.eod),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        return GPTDataset(self.indexed, self.prefix, self.documents, None, self.index_split, config)

    @cached_property
    def fingerprint(self) -> str:
        """Of the documents: all their lengths, and 64 pieces of their file."""
        digest = hashlib.sha256(np.ascontiguousarray(self.indexed.sequence_lengths[self.documents]).tobytes())
        path = Path(get_bin_path(self.prefix))
        size = path.stat().st_size
        with open(path, "rb") as file:
            for piece in range(64):
                file.seek(size * piece // 64)
                digest.update(file.read(4096))
        return digest.hexdigest()[:16]

    @cached_property
    def _cache(self) -> Path:
        """A folder for exactly these windows: Megatron's own cache key knows the corpus by its path, whatever documents
        are there now, and an epoch's marker (see `build_index`) has to mean this split with these settings."""
        settings = self.settings
        numbers = (settings.sequence_length, settings.vocab_size, settings.eod, settings.seed)
        lengths = np.ascontiguousarray(self.indexed.sequence_lengths[self.documents])
        digest = hashlib.sha256(repr((self.prefix, self.index_split.name, *numbers)).encode())
        digest.update(self.documents.tobytes() + lengths.tobytes())
        return settings.index_cache / digest.hexdigest()[:16]

    def build_index(self, samples: int) -> None:
        """Make the sample indices of the first `samples` samples, if they are not in the cache.

        To be called before torch.distributed starts, by one process a node: once it has started, Megatron lets only
        global rank 0 build, which fails where disks are local to nodes. Files are made in a private folder and
        published one by one by renaming, so two nodes that share a disk may both build: they write the same bytes.
        """
        assert not torch.distributed.is_initialized()
        for epoch in range(-(-samples // self.samples_per_epoch)):
            done = self._cache / f"epoch-{epoch}.built"
            if done.is_file():
                continue
            self._cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=self._cache) as private:
                self._epoch(epoch, Path(private))
                for file in sorted(Path(private).iterdir()):
                    os.replace(file, self._cache / file.name)
            done.touch()


def _epoch_seed(seed: int, epoch: int) -> int:
    """A seed of 32 bits, as numpy wants it. Mixed, so that no epoch of one run repeats another epoch of another."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:4], "little")


def documents_of(prefix: str, valid_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Document numbers of the training and the validation part: the last `valid_fraction` of them are kept out.

    Raises UserError where a part would be empty, or documents are stored in pieces.
    """
    indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
    count = len(indexed.document_indices) - 1
    if count != len(indexed):
        raise UserError(
            f"{prefix} has {count} documents in {len(indexed)} sequences (Megatron's --split-sentences?), which would "
            "be shuffled apart: prepare it with one sequence a document"
        )
    valid = round(count * valid_fraction)
    if count - valid < 1 or (valid_fraction and valid < 1):
        raise UserError(
            f"{prefix} has {count} documents: data.valid_fraction={valid_fraction} leaves {count - valid} to train on "
            f"and {valid} to validate on; both must be at least 1"
        )
    numbers = np.arange(count, dtype=np.int32)
    return numbers[: count - valid], numbers[count - valid :]


def corpora(config: DataConfig, split: Split, settings: WindowSettings) -> tuple[list[EpochedCorpus], list[float]]:
    """The corpora of a split and their weights.

    Raises UserError for a split that is empty or too small for one window.
    """
    own_valid = split is Split.valid and config.valid
    sources = config.valid if own_valid else config.train
    fraction = 0.0 if config.valid else config.valid_fraction
    part = 1 if split is Split.valid and not own_valid else 0
    found = [EpochedCorpus(s.prefix, documents_of(s.prefix, fraction)[part], split, settings) for s in sources]
    return found, [source.weight for source in sources]


def samples_from_each(weights: list[float], samples: int) -> list[int]:
    """At least how many samples a blend of `samples` draws from each corpus (it keeps within one of its share)."""
    total = sum(weights)
    return [int(samples * weight / total) + 2 for weight in weights]


def blend(parts: list[EpochedCorpus], weights: list[float], samples: int) -> Dataset[dict[str, torch.Tensor]]:
    """One dataset of `samples` samples: at every point each corpus has given its share, within one.

    Megatron's order, which depends on the weights alone, so a longer blend continues a shorter one.
    """
    if len(parts) == 1:
        return parts[0]
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=parts[0].settings.sequence_length,
        blend=([part.prefix for part in parts], list(weights)),
        split="1",
        path_to_cache=None,  # kept in memory: making it takes a second, and only rank 0 could write it
        tokenizer=IndexIdentity(parts[0].settings.vocab_size, parts[0].settings.eod),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedDataset(parts, list(weights), samples, config)
