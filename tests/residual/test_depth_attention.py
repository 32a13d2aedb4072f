"""The depth read against its formula, written naively: values, gradients, precision and what it keeps for backward."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from depthbench.residual.depth_attention import depth_attention

S, B, D = 5, 3, 37  # tokens, microbatch, a width that is no power of two
EPS = 1e-5


def naive(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    values = torch.stack(list(sources))
    keys = gain * values / torch.sqrt(values.square().mean(-1, keepdim=True) + eps)
    weights = torch.softmax((keys * query).sum(-1), 0)
    return (weights.unsqueeze(-1) * values).sum(0)


def leaves(count: int, width: int = D, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """`count` sources of growing size, then a query and a gain that make the softmax far from flat."""
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sources = [(scale * (1 + n / 4) * draw(S, B, width)).to(dtype) for n in range(count)]
    wide = torch.promote_types(dtype, torch.float32)
    read = [(2 * draw(width) / width**0.5).to(wide), (1 + 0.3 * draw(width)).to(wide)]
    return [tensor.requires_grad_() for tensor in (*sources, *read)]


def gradients(function: Any, tensors: list[Tensor], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    *sources, query, gain = tensors
    mixed = function(sources, query, gain)
    return mixed.detach(), list(torch.autograd.grad(mixed, tensors, upstream.to(mixed)))


def ours(sources: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    return depth_attention(sources, query * gain, EPS)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])  # eps is felt; eps is not; large sources
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_float64(count: int, scale: float) -> None:
    tensors = leaves(count, scale=scale)
    upstream = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    mixed, found = gradients(ours, tensors, upstream)
    expected, wanted = gradients(naive, tensors, upstream)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-14 * scale)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12 * max(float(other.abs().max()), 1e-30))


def test_gradcheck() -> None:
    tensors = leaves(4, width=5)
    torch.autograd.gradcheck(lambda *t: depth_attention(t[:-2], t[-2] * t[-1], EPS), tensors)


def test_only_needed_gradients_are_made() -> None:
    """A source that is a constant, and one that is used twice."""
    first, second, query, gain = leaves(2)
    mixed = depth_attention([first.detach(), second, second], query * gain, EPS)
    mixed.square().sum().backward()
    wanted = torch.autograd.grad(naive([first.detach(), second, second], query, gain).square().sum(), second)[0]
    assert first.grad is None
    assert second.grad is not None
    torch.testing.assert_close(second.grad, wanted, rtol=1e-10, atol=1e-12)


def test_extreme_logits() -> None:
    """Logits in the thousands: the largest wins, and nothing is lost to overflow."""
    sources = [torch.full((1, 1, D), value, dtype=torch.float64) for value in (-1.0, 1.0, 2.0)]
    query, gain = torch.full((D,), 100.0, dtype=torch.float64), torch.ones(D, dtype=torch.float64)
    mixed = depth_attention(sources, query * gain, 0.0)
    torch.testing.assert_close(mixed, torch.full((1, 1, D), 1.5, dtype=torch.float64))


@pytest.mark.parametrize("count", [2, 40])
def test_bfloat16_is_rounded_once(count: int) -> None:
    """With bfloat16 sources everything inside is float32: against float64 of the same values, the output and the
    sources' gradients are off by their own rounding (2^-8) and by nothing else."""
    tensors = leaves(count, width=300, dtype=torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    upstream = torch.randn(S, B, 300, generator=torch.Generator().manual_seed(9)).bfloat16()
    mixed, found = gradients(ours, tensors, upstream)
    expected, wanted = gradients(naive, wide, upstream)
    assert mixed.dtype is torch.bfloat16
    for one, other in zip([mixed, *found], [expected, *wanted], strict=True):
        rounding = 2**-8 if one.dtype is torch.bfloat16 else 0.0
        error = (one.double() - other).abs() - rounding * other.abs() * 1.01
        assert float(error.max() / other.abs().max()) < 2e-5
    assert [g.dtype for g in found] == [torch.bfloat16] * count + [torch.float32] * 2


def saved(count: int) -> tuple[int, list[Tensor]]:
    """Bytes that a read of `count` sources keeps beyond its arguments, and every tensor it keeps."""
    *sources, query, gain = leaves(count, dtype=torch.bfloat16)
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        w = query * gain
        kept.clear()
        depth_attention(sources, w, EPS)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*sources, w)}
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for place, size in own.items() if place not in given), kept


def test_what_is_kept_for_backward() -> None:
    """Two float32 numbers a source and token, and references: no stack of sources."""
    for count in (1, 2, 10, 40):
        extra, kept = saved(count)
        assert extra == count * 2 * S * B * 4
        assert max(tensor.numel() for tensor in kept) <= max(S * B * D, count * S * B)
        assert sum(tensor.numel() == S * B * D for tensor in kept) == count
