"""Forward and backward passes of one global batch, through Megatron-Core's schedule."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from depthbench.data.loader import Batch

from .wrapped import WrappedModel


class BatchLoss(NamedTuple):
    """Over the global batch: summed loss of unmasked tokens, and how many there were."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.total / max(self.tokens, 1)


def forward_step(batches: Iterator[Batch], chunk: DistributedDataParallel) -> tuple[Tensor, Any]:
    """What the schedule calls for each microbatch and chunk. Of all but the last chunk it takes the message alone."""
    device, span = torch.cuda.current_device(), chunk.module.span
    batch = next(batches)
    read = [*(["tokens"] if span.has_embedding else []), *(["labels", "loss_mask"] if span.has_head else [])]
    batch = {**batch, **{name: batch[name].to(device, non_blocking=True) for name in read}}
    losses_SB = chunk(batch["tokens"], batch["labels"])

    def masked_sum(losses_SB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(loss to differentiate, its tokens, what to report). Megatron divides gradients by all tokens at the end."""
        mask_SB = batch["loss_mask"].transpose(0, 1)
        total = (losses_SB * mask_SB).sum()
        tokens = mask_SB.sum()
        return total, tokens.to(torch.int), torch.stack([total.detach().double(), tokens.double()])

    return losses_SB, masked_sum


def run_microbatches(model: WrappedModel, microbatches: Sequence[Batch], *, forward_only: bool) -> BatchLoss:
    """All of them through this rank's chunks; unless forward_only, gradients of the token mean over the global batch
    are left in the gradient buffers, reduced. The loss is known to every rank. A collective call."""
    transport, context = model.transport, model.context
    several = len(model.chunks) > 1
    passing = transport.communicate(len(microbatches), forward_only) if transport else nullcontext()
    with passing as communicator:
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in model.chunks] if several else iter(microbatches),
            model=model.chunks if several else model.chunks[0],
            num_microbatches=len(microbatches),
            seq_length=model.stages[0].model_config.sequence_length,
            micro_batch_size=1,  # this and the length before: a message takes its shape from its edge
            forward_only=forward_only,
            p2p_communicator=communicator,
            pg_collection=_groups() if transport else None,
        )
    device = torch.cuda.current_device()
    # only the last stage reports
    total = torch.stack(reports).sum(0) if reports else torch.zeros(2, dtype=torch.float64, device=device)
    with model.waiting("other ranks' losses"):
        dist.all_reduce(total, group=context.dp_group)
        if transport:
            dist.all_reduce(total, group=context.pp_group)
        loss, tokens = total.tolist()
    return BatchLoss(loss, int(tokens))


def _groups() -> ProcessGroupCollection:
    """Those that the pipeline schedules want along with a communicator."""
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "dp_cp"])
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = None
    return groups
