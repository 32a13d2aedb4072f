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
    heads, tokens, size = q.shape[1:]
    meets = [head * k.shape[1] // heads for head in range(heads)]
    k, v = k[:, meets], v[:, meets]
    depth_k, depth_v = [key[:, meets] for key in depth_k], [value[:, meets] for value in depth_v]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    over_sequence = (q @ k.mT).masked_fill(future, float("-inf"))
    over_depth = [(q * key).sum(-1, keepdim=True) for key in depth_k]
    p = torch.softmax(torch.cat([over_sequence, *over_depth], -1) / math.sqrt(size), -1)
    out = p[..., :tokens] @ v
    for n, value in enumerate(depth_v):
        out = out + p[..., tokens + n, None] * value
    return out


def leaves(
    tokens: int, size: int, slots: int, dtype: torch.dtype = torch.float64, heads: int = H, kv_heads: int = H
) -> list[Tensor]:
    """q, k, v, then keys and values of the slots; made [S, B, heads, K], as the model has them."""
    generator = torch.Generator().manual_seed(100 * tokens + size)

    def draw(heads: int) -> Tensor:
        return 1.5 * torch.randn(tokens, B, heads, size, generator=generator, dtype=torch.float64)

    counts = [heads] + [kv_heads] * (2 + 2 * slots)
    return [draw(count).to(dtype).permute(1, 2, 0, 3).requires_grad_() for count in counts]


def run(function: Any, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    q, k, v, *depth = tensors
    slots = len(depth) // 2
    out = function(q, k, v, depth[:slots], depth[slots:])
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return out.detach(), list(torch.autograd.grad(out, tensors, upstream.to(out)))


@pytest.mark.parametrize("size", [6, 8, 76])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (16, 1), (16, 23), (70, 5), (600, 2)])  # kernels go by 32 to 512
def test_float64(tokens: int, slots: int, size: int) -> None:
    check_float64(leaves(tokens, size, slots))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (6, 6), (4, 1), (1, 1)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    """Query heads that share a key/value head all add to its gradient."""
    check_float64(leaves(70, 6, 3, heads=heads, kv_heads=kv_heads))


def check_float64(tensors: list[Tensor]) -> None:
    out, grads = run(joint_attention, tensors)
    expected, wanted = run(naive, tensors)
    for one, other in zip([out, *grads], [expected, *wanted], strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * float(other.abs().max()))


@pytest.mark.parametrize("kv_heads", [H, 1])
@pytest.mark.parametrize(("tokens", "slots", "size"), [(16, 3, 6), (70, 5, 76)])
def test_without_a_kernel(tokens: int, slots: int, size: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What float32 and float64 take on CUDA."""
    monkeypatch.setattr(depth_sdpa, "_has_kernel", lambda q: False)
    check_float64(leaves(tokens, size, slots, kv_heads=kv_heads))


@pytest.mark.parametrize("kv_heads", [H, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("size", [6, 8, 76])
def test_lower_precision(size: int, dtype: torch.dtype, tolerance: float, kv_heads: int) -> None:
    """Against float64 of the same rounded inputs; tolerances are of each tensor's largest element."""
    tensors = leaves(70, size, 11, dtype, kv_heads=kv_heads)
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


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saves_no_copies(dtype: torch.dtype, kv_heads: int) -> None:
    """Backward keeps q, k, v, the slots and the output themselves, and besides them one log-sum-exp."""
    q, k, v, *depth = leaves(16, 8, 5, dtype, heads=6, kv_heads=kv_heads)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = joint_attention(q, k, v, depth[:5], depth[5:])
    for known in (q, k, v, *depth, out):
        saved.pop(known.untyped_storage().data_ptr())
    (lse,) = saved.values()
    assert lse.shape == out.shape[:3]
    assert lse.untyped_storage().nbytes() == 4 * lse.numel()
