"""Validation loss over a fixed set, the same for every layout."""

from collections.abc import Callable

import torch

from depthbench.data.evaluation import PaddedSet
from depthbench.data.loader import SampleOrder, batches

from .step import BatchLoss, run_microbatches
from .wrapped import WrappedModel


@torch.no_grad()
def evaluate(
    model: WrappedModel, items: PaddedSet, micro_batch: int, interrupted: Callable[[], bool]
) -> BatchLoss | None:
    """Loss summed over every unmasked token of `items`; None if `interrupted` (a collective call) came true midway."""
    context = model.context
    stride = micro_batch * context.dp_size
    # a pipeline's schedule wants whole groups of microbatches
    unit = model.transport.options.group if model.transport else 1
    rounds = -(-items.count // (stride * unit)) * unit
    most = max(unit, 8 // unit * unit)
    stream = batches(items, SampleOrder(0, rounds * stride, micro_batch, context.dp_rank, context.dp_size), 0)
    total, tokens, done = 0.0, 0, 0
    model.train(False)
    try:
        while done < rounds:
            count = min(most, rounds - done)
            loss = run_microbatches(model, [next(stream) for _ in range(count)], forward_only=True)
            total, tokens, done = total + loss.total, tokens + loss.tokens, done + count
            if done < rounds and interrupted():
                return None
    finally:
        model.train()
    return BatchLoss(total, tokens)
