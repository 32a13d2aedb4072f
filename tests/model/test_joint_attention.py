"""MoDA's attention against one softmax over concatenated scores, written naively."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.model import depth_sdpa
from depthbench.model.depth_sdpa import joint_attention

B, H = 2, 3


def naive(q: Tensor, k: Tensor, v: Tensor, depth_k: Sequence[Tensor], depth_v: Sequence[Tensor]) -> Tensor:
    tokens, size = q.shape[-2:]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    over_sequence = (q @ k.mT).masked_fill(future, float("-inf"))
    over_depth = [(q * key).sum(-1, keepdim=True) for key in depth_k]
    p = torch.softmax(torch.cat([over_sequence, *over_depth], -1) / math.sqrt(size), -1)
    out = p[..., :tokens] @ v
    for n, value in enumerate(depth_v):
        out = out + p[..., tokens + n, None] * value
    return out


def leaves(tokens: int, size: int, slots: int, dtype: torch.dtype = torch.float64, heads: int = H) -> list[Tensor]:
    """q, k, v, then keys and values of the slots; made [S, B, H, K], as the model has them."""
    generator = torch.Generator().manual_seed(100 * tokens + size)

    def draw() -> Tensor:
        return 1.5 * torch.randn(tokens, B, heads, size, generator=generator, dtype=torch.float64)

    return [draw().to(dtype).permute(1, 2, 0, 3).requires_grad_() for _ in range(3 + 2 * slots)]


def run(function: Any, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    q, k, v, *depth = tensors
    slots = len(depth) // 2
    out = function(q, k, v, depth[:slots], depth[slots:])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return out.detach(), list(torch.autograd.grad(out, tensors, upstream.to(out)))


@pytest.mark.parametrize("size", [6, 8, 76])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (16, 1), (16, 23), (70, 5), (600, 2)])  # kernels go by 32 to 512
def test_float64(tokens: int, slots: int, size: int) -> None:
    tensors = leaves(tokens, size, slots)
    out, grads = run(joint_attention, tensors)
    expected, wanted = run(naive, tensors)
    for one, other in zip([out, *grads], [expected, *wanted], strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize(("tokens", "slots", "size"), [(16, 3, 6), (70, 5, 76)])
def test_without_a_kernel(tokens: int, slots: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What float32 and float64 take on CUDA."""
    monkeypatch.setattr(depth_sdpa, "_has_kernel", lambda q: False)
    test_float64(tokens, slots, size)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("size", [6, 8, 76])
def test_lower_precision(size: int, dtype: torch.dtype, tolerance: float) -> None:
    """Against float64 of the same rounded inputs; tolerances are of each tensor's largest element."""
    tensors = leaves(70, size, 11, dtype)
    out, grads = run(joint_attention, tensors)
    expected, wanted = run(naive, [tensor.detach().double().requires_grad_() for tensor in tensors])
    for one, other in zip([out, *grads], [expected, *wanted], strict=True):
        assert one.dtype is dtype
        assert float((one.double() - other).abs().max() / other.abs().max()) < tolerance


def test_depth_keys_alone_can_win() -> None:
    """Scores in the thousands, over depth and over the sequence: no overflow, and the winner's value comes out."""
    q, k, v, near, far, worth, _ = (t.detach() for t in leaves(9, 8, 2))
    for strong, value in ((near, worth), (k, v)):
        strong.copy_(1e3 * q)
        out = joint_attention(q, k, v, [near, far], [worth, worth])
        assert torch.isfinite(out).all()
        if strong is near:
            torch.testing.assert_close(out, value)
        strong.copy_(far)


def test_grouped_queries_are_spread_by_the_caller() -> None:
    """Repeated key/value heads gather their gradients from all the queries that share them."""
    q = leaves(16, 8, 0, heads=6)[0]
    shared = leaves(17, 8, 2, heads=2)
    shared = [t.detach()[:, :, :16].clone().requires_grad_() for t in shared]

    def grouped(function: Any) -> list[Tensor]:
        k, v, _, *depth = (t.repeat_interleave(3, 1) for t in shared)
        out = function(q, k, v, depth[:2], depth[2:])
        return [out, *torch.autograd.grad(out.square().sum(), [q, *shared[:2], *shared[3:]])]

    for one, other in zip(grouped(joint_attention), grouped(naive), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * float(other.abs().max()))
