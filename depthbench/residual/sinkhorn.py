"""Sinkhorn normalisation of small matrices, one a token: mHC's projection to (nearly) doubly stochastic matrices.

Orders in use, which agree to 5e-5 for logits of spread 1 and differ visibly for large ones (conventions 8):

    rows first,    eps 1e-6    DeepSeek-V4, Liger, Megatron-LM since 2026; the default
    rows first,    eps 0       Megatron-LM's first version
    columns first, eps 0       the paper, arXiv 2512.24880 v2

The last normalisation is exact up to eps: rows first leaves column sums of 1, columns first row sums of 1.

Backward repeats the iterations from the logits and goes back through them; Newton-like shortcuts that assume unit sums
are wrong after finitely many. Tokens are the last axis inside, so that each step is one long vector operation.

Shapes: S tokens, B microbatch, N streams, T = S B.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, COLUMNS = 1, 0  # the axis of [N, N, T] to sum over


def _axes(rows_first: bool, iterations: int) -> Iterator[int]:
    """Of the normalisations after the first, which is a softmax."""
    pair = (COLUMNS, ROWS) if rows_first else (ROWS, COLUMNS)
    return (pair[step % 2] for step in range(2 * iterations - 1))


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_SBNN: Tensor, iterations: int, eps: float, rows_first: bool) -> Tensor:
        ctx.save_for_backward(logits_SBNN)
        ctx.iterations, ctx.eps, ctx.rows_first = iterations, eps, rows_first
        matrix_NNT = _first(logits_SBNN, rows_first) + eps
        for axis in _axes(rows_first, iterations):
            matrix_NNT /= matrix_NNT.sum(axis, keepdim=True).add_(eps)
        # contiguous: torch multiplies a batch of matrices with unusual strides one by one
        return matrix_NNT.permute(2, 0, 1).contiguous().view(logits_SBNN.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBNN: Tensor) -> Any:
        (logits_SBNN,) = ctx.saved_tensors
        axes = list(_axes(ctx.rows_first, ctx.iterations))
        first_NNT = _first(logits_SBNN, ctx.rows_first)
        steps = [first_NNT + ctx.eps]
        sums = []
        for axis in axes:
            sums.append(steps[-1].sum(axis, keepdim=True).add_(ctx.eps))
            steps.append(steps[-1] / sums[-1])
        grad_NNT = grad_SBNN.flatten(0, 1).permute(1, 2, 0).contiguous()
        for axis in reversed(axes):  # M' = M / (sum M + eps):  dM = (dM' - sum dM' M') / (sum M + eps)
            grad_NNT -= (grad_NNT * steps.pop()).sum(axis, keepdim=True)
            grad_NNT /= sums.pop()
        axis = ROWS if ctx.rows_first else COLUMNS
        grad_NNT -= (grad_NNT * first_NNT).sum(axis, keepdim=True)
        grad_NNT *= first_NNT
        return grad_NNT.permute(2, 0, 1).reshape(logits_SBNN.shape), None, None, None


def _first(logits_SBNN: Tensor, rows_first: bool) -> Tensor:
    """The first normalisation of exp(logits): [N, N, T]. Never quite zero: a row or column of zeros would become NaN
    where eps is 0, and one of the smallest numbers overflow in backward."""
    logits_NNT = logits_SBNN.flatten(0, 1).permute(1, 2, 0).contiguous()
    smallest = torch.finfo(logits_NNT.dtype).tiny ** 0.8
    return torch.softmax(logits_NNT, ROWS if rows_first else COLUMNS).clamp_(min=smallest)


def sinkhorn(logits_SBNN: Tensor, iterations: int, eps: float, *, rows_first: bool = True) -> Tensor:
    """exp(logits), normalised `iterations` times by rows and by columns in turn.

    eps: added to each entry after the first normalisation, and to every denominator after it.
    """
    matrix: Tensor = _Sinkhorn.apply(logits_SBNN, iterations, eps, rows_first)
    return matrix
