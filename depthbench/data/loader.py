"""Batches: which samples a rank sees at which step, and the loader that fetches them.

The run's samples form one sequence; step t takes the next `global_batch` of it, microbatch by microbatch, and within a
microbatch data-parallel rank by rank. So a step's samples depend neither on the number of ranks nor on where a run was
stopped.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from depthbench.parallel.signals import ignore_stop_signals

Batch = dict[str, Tensor]
"""`tokens`, `labels` [B, S] int64 and `loss_mask` [B, S] float32."""


@dataclass(frozen=True)
class SampleOrder:
    """Iterates this rank's microbatches, each a list of sample numbers, from sample `start` to sample `end`."""

    start: int
    end: int
    micro_batch: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.start + self.dp_rank * self.micro_batch, self.end, self.micro_batch * self.dp_size):
            yield list(range(first, first + self.micro_batch))

    def __len__(self) -> int:
        return (self.end - self.start) // (self.micro_batch * self.dp_size)


def _collate(samples: list[Batch]) -> Batch:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels", "loss_mask")}


def batches(dataset: Dataset[Batch], order: SampleOrder, workers: int) -> Iterator[Batch]:
    """This rank's microbatches in order. The loader is made here, after the position is known."""
    return iter(
        DataLoader(
            dataset,
            batch_sampler=order,
            num_workers=workers,
            collate_fn=_collate,
            worker_init_fn=ignore_stop_signals,
            pin_memory=torch.cuda.is_available(),
        )
    )
