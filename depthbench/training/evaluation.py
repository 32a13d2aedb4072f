"""Validation loss over a fixed set, the same for every layout."""

from collections.abc import Callable

import torch
from megatron.core.distributed import DistributedDataParallel

from depthbench.data.evaluation import PaddedSet
from depthbench.data.loader import SampleOrder, batches

from .step import BatchLoss, run_microbatches


@torch.no_grad()
def evaluate(
    ddp: DistributedDataParallel, items: PaddedSet, micro_batch: int, interrupted: Callable[[], bool]
) -> BatchLoss | None:
    """Loss summed over every unmasked token of `items`; None if `interrupted` (a collective call) came true midway."""
    context = ddp.module.context
    stride = micro_batch * context.dp_size
    rounds = -(-items.count // stride)
    stream = batches(items, SampleOrder(0, rounds * stride, micro_batch, context.dp_rank, context.dp_size), 0)
    total, tokens, done = 0.0, 0, 0
    ddp.eval()
    try:
        while done < rounds:
            count = min(8, rounds - done)
            loss = run_microbatches(ddp, stream, count, forward_only=True)
            total, tokens, done = total + loss.total, tokens + loss.tokens, done + count
            if done < rounds and interrupted():
                return None
    finally:
        ddp.train()
    return BatchLoss(total, tokens)
