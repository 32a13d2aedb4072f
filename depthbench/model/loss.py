"""Cross entropy over a vocabulary divided across tensor-parallel ranks, padding masked.

Megatron-Core's own computes in float32 whatever the logits are and keeps the softmax for backward. This one computes in
float32 or better (so float64 models are float64 throughout) and keeps only the logits and one scalar a token.

Shapes: S sequence, B microbatch, W this rank's vocabulary rows (padding included).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthbench.parallel.context import ParallelContext


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_SBW: Tensor, labels_SB: Tensor, vocab_size: int, context: ParallelContext) -> Tensor:
        rows = logits_SBW.shape[-1]
        start = context.tp_rank * rows
        wide = logits_SBW.to(torch.promote_types(logits_SBW.dtype, torch.float32), copy=True)
        wide[..., max(0, min(rows, vocab_size - start)) :] = float("-inf")
        top_SB = wide.amax(-1)
        if context.tp_size > 1:
            dist.all_reduce(top_SB, dist.ReduceOp.MAX, group=context.tp_group)
        mine_SB = (labels_SB >= start) & (labels_SB < start + rows)
        local_SB = torch.where(mine_SB, labels_SB - start, 0)
        picked_SB = wide.gather(-1, local_SB.unsqueeze(-1)).squeeze(-1).masked_fill(~mine_SB, 0.0)
        total_SB = wide.sub_(top_SB.unsqueeze(-1)).exp_().sum(-1)
        both = torch.stack([total_SB, picked_SB])
        if context.tp_size > 1:
            dist.all_reduce(both, group=context.tp_group)
        lse_SB = both[0].log() + top_SB
        ctx.valid_rows = max(0, min(rows, vocab_size - start))
        ctx.save_for_backward(logits_SBW, lse_SB, local_SB, mine_SB)
        return lse_SB - both[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SB: Tensor) -> Any:
        logits_SBW, lse_SB, local_SB, mine_SB = ctx.saved_tensors
        grad = logits_SBW.to(lse_SB.dtype, copy=True).sub_(lse_SB.unsqueeze(-1)).exp_()
        grad[..., ctx.valid_rows :] = 0.0
        at = local_SB.unsqueeze(-1)  # one row a token, so gather and scatter suffice, and are deterministic
        grad.scatter_(-1, at, grad.gather(-1, at) - mine_SB.to(grad.dtype).unsqueeze(-1))
        return grad.mul_(grad_SB.unsqueeze(-1)).to(logits_SBW.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits_SBW: Tensor, labels_SB: Tensor, vocab_size: int, context: ParallelContext
) -> Tensor:
    """Per-token loss [S, B], float32 or better, equal on all tensor-parallel ranks.

    labels_SB: global ids below vocab_size. Rows at or past vocab_size are padding and get no probability.
    """
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits_SBW, labels_SB, vocab_size, context)
    return losses
