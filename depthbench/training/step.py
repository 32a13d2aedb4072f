"""Forward and backward passes of one global batch, through Megatron-Core's schedule."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from depthbench.data.loader import Batch


class BatchLoss(NamedTuple):
    """Over the global batch: summed loss of unmasked tokens, and how many there were."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)


def forward_step(batches: Iterator[Batch], ddp: DistributedDataParallel) -> tuple[Tensor, Any]:
    """What the schedule calls for each microbatch."""
    device = torch.cuda.current_device()
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in next(batches).items()}
    losses_SB = ddp(batch["tokens"], batch["labels"])

    def masked_sum(losses_SB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss to differentiate, its tokens, what to report). Megatron divides gradients by all tokens at the end."""
        mask_SB = batch["loss_mask"].transpose(0, 1)
        total = (losses_SB * mask_SB).sum()
        tokens = mask_SB.sum()
        return total, tokens.to(torch.int), torch.stack([total.detach().double(), tokens.double()])

    return losses_SB, masked_sum


def run_microbatches(
    ddp: DistributedDataParallel, batches: Iterator[Batch], count: int, *, forward_only: bool
) -> BatchLoss:
    """`count` microbatches of this rank; unless forward_only, gradients of the token mean over the global batch are
    left in the gradient buffers, reduced."""
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=ddp,
        num_microbatches=count,
        seq_length=ddp.module.model_config.sequence_length,
        micro_batch_size=1,
        forward_only=forward_only,
    )
    total = torch.stack(reports).sum(0)
    dist.all_reduce(total, group=ddp.module.context.dp_group)
    return BatchLoss(float(total[0]), int(total[1]))
