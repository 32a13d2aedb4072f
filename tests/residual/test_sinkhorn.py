"""Sinkhorn against its equations, written naively: values, gradients, sums, extremes, what it keeps for backward."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from depthbench.residual.sinkhorn import sinkhorn

S, B = 5, 3
ROW, COLUMN = -1, -2  # what a sum over input streams, and over output streams, runs along
ORDERS = pytest.mark.parametrize("rows_first", [True, False])
EPS = pytest.mark.parametrize("eps", [1e-6, 0.0])


def naive(logits: Tensor, iterations: int, eps: float, rows_first: bool) -> Tensor:
    one, other = (ROW, COLUMN) if rows_first else (COLUMN, ROW)
    exponential = torch.exp(logits)
    matrix = exponential / exponential.sum(one, keepdim=True) + eps
    for step in range(iterations):
        if step > 0:
            matrix = matrix / (matrix.sum(one, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(other, keepdim=True) + eps)
    return matrix


def draw(n: int, spread: float = 1.0, tokens: int = S * B) -> Tensor:
    """[tokens / B, B, n, n]"""
    generator = torch.Generator().manual_seed(n)
    return spread * torch.randn(tokens // B, B, n, n, generator=generator, dtype=torch.float64)


@ORDERS
@EPS
@pytest.mark.parametrize("iterations", [1, 2, 20])
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_float64(spread: float, iterations: int, eps: float, rows_first: bool) -> None:
    """Not contiguous, neither logits nor upstream: mHC's logits are columns of a wider product."""
    for n in range(1, 9):
        logits = draw(n, spread).transpose(0, 1).requires_grad_()
        upstream = draw(n + 10)[..., :n, :n].transpose(0, 1)
        found = sinkhorn(logits, iterations, eps, rows_first=rows_first)
        expected = naive(logits, iterations, eps, rows_first)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        (one,), (other,) = (torch.autograd.grad(m, logits, upstream) for m in (found, expected))
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@ORDERS
def test_gradcheck(rows_first: bool) -> None:
    logits = draw(3, tokens=2 * B).requires_grad_()
    torch.autograd.gradcheck(lambda x: sinkhorn(x, 3, 1e-6, rows_first=rows_first), logits)


def test_one_order_is_the_other_of_the_transpose() -> None:
    logits = draw(5)
    found = sinkhorn(logits, 20, 1e-6, rows_first=False)
    torch.testing.assert_close(found, sinkhorn(logits.mT, 20, 1e-6).mT, rtol=1e-13, atol=0)
    assert (found - sinkhorn(logits, 20, 1e-6)).abs().max() > 1e-7


@ORDERS
@EPS
def test_sums(eps: float, rows_first: bool) -> None:
    """The last normalisation is exact but for eps, the one before it nearly: to 1e-3 for all logits within a range of
    1; for 99 % of normal logits of deviation 1, and for all of these to 2e-2 (small matrices converge slowest)."""
    last, before = (COLUMN, ROW) if rows_first else (ROW, COLUMN)
    for n in range(1, 9):
        even = torch.rand(1000, B, n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        matrix = sinkhorn(even, 20, eps, rows_first=rows_first)
        assert (matrix.sum(before) - 1).abs().max() < 1e-3
        matrix = sinkhorn(draw(n, tokens=3000), 20, eps, rows_first=rows_first)
        assert (matrix > 0).all()
        assert (matrix.sum(last) - 1).abs().max() < (2e-6 if eps else 1e-12)
        error = (matrix.sum(before) - 1).abs().amax(-1).flatten()
        assert error.quantile(0.99) < 1e-3
        assert error.max() < 2e-2


@EPS
def test_orders_agree_for_small_logits(eps: float) -> None:
    """Conventions 8: to 5e-5 at spread 1, which 99.9 % of matrices keep; at spread 5 the order shows."""
    for spread, likely, most in ((1.0, 5e-5, 1e-2), (5.0, 0.5, 1.0)):
        logits = draw(4, spread, tokens=9000)
        rows, columns = (sinkhorn(logits, 20, eps, rows_first=first) for first in (True, False))
        distance = (rows - columns).abs().amax((-1, -2)).flatten()
        assert likely / 10 < distance.quantile(0.999) < likely
        assert distance.max() < most


@ORDERS
@EPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("iterations", [1, 20])
def test_extreme_logits_stay_finite(iterations: int, dtype: torch.dtype, eps: float, rows_first: bool) -> None:
    """Without eps a column that underflows (float32: all of it e^-88 below its rows' largest) is 0 / 0."""
    size = 40.0 if eps == 0 and dtype is torch.float32 else 100.0
    signs = torch.randint(0, 2, (S, B, 4, 4), generator=torch.Generator().manual_seed(0)) * 2 - 1
    signs[0, 0], signs[0, 1, :, 0], signs[0, 1, 0] = -1, -1, -1  # nothing stands out; one row and column far below
    logits = (size * signs).to(dtype).requires_grad_()
    matrix = sinkhorn(logits, iterations, eps, rows_first=rows_first)
    matrix.square().sum().backward()
    assert logits.grad is not None
    assert matrix.isfinite().all() and logits.grad.isfinite().all()


def test_float32_is_the_float64_result_rounded() -> None:
    logits, upstream = draw(4, 2.0).float(), draw(4)

    def both(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = logits.to(dtype).requires_grad_()
        matrix = sinkhorn(leaf, 20, 1e-6)
        return matrix.detach(), torch.autograd.grad(matrix, leaf, upstream.to(dtype))[0]

    for one, other in zip(both(torch.float32), both(torch.float64), strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-6)


@ORDERS
def test_only_the_logits_are_kept_for_backward(rows_first: bool) -> None:
    logits = draw(4).requires_grad_()
    kept: list[Any] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        sinkhorn(logits, 20, 1e-6, rows_first=rows_first)
    assert [tensor.data_ptr() for tensor in kept] == [logits.data_ptr()]
