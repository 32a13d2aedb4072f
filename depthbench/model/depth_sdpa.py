"""Causal attention with one softmax over the sequence and, at each query's own token, over keys of earlier depth.

MoDA (arXiv 2603.15619). The sequence part runs through torch's flash kernel, which also returns its log-sum-exp; the
depth part is merged by it. A flash backward computes P = exp(QK - lse) and delta = <dO, O>; given the *joint* output
and log-sum-exp it yields exactly the joint softmax's gradients for the sequence part, so no second kernel is needed.
CUDA has no such kernel for float32 and float64: there the same runs in plain matmuls, with all scores in memory.

The backward pass keeps the inputs, not copies: what it saves grows by nothing with the number of slots.

Shapes: N slots, B microbatch, H heads in G groups of R, one group per KV head, S sequence, K head dim.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


def _has_kernel(q: Tensor) -> bool:
    """The CPU kernel takes every dtype, the CUDA one half precisions alone."""
    return not q.is_cuda or q.dtype in (torch.bfloat16, torch.float16)


def _plain_scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores: Tensor = (q @ k.mT) * scale
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(future, float("-inf"))


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    scores = _plain_scores(q, k, scale, causal)
    lse = torch.logsumexp(scores, -1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = (_plain_scores(q, k, scale, causal=True) - lse.unsqueeze(-1)).exp()
    dscore = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return dscore @ k, dscore.mT @ q, p.mT @ grad


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The CUDA kernel wants head sizes in multiples of 8; zeros change nothing."""
    padding = -tensors[0].shape[-1] % 8
    return [F.pad(t, (0, padding)) if padding else t for t in tensors]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = True
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output, log-sum-exp [B, H, S] and what the backward kernel wants besides.

    causal: query s sees keys 0 .. s; else every query sees every key, of which there may be another number.
    """
    if not _has_kernel(q):
        return *_plain_forward(q, k, v, scale, causal), ()
    if q.is_cuda:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            *_padded(q, k, v), 0.0, causal, scale=scale
        )
        return out[..., : q.shape[-1]], lse, (cum_q, cum_k, max_q, max_k, seed, offset)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse, ()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, extra: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    if not _has_kernel(q):
        return _plain_backward(grad, q, k, v, out, lse, scale)
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = extra
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *_padded(grad, q, k, v, out), lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
        )
        size = q.shape[-1]
        return dq[..., :size], dk[..., :size], dv[..., :size]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, True, scale=scale
    )
    return dq, dk, dv


def spread(t_BGSK: Tensor, heads: int) -> Tensor:
    """Repeat KV heads so that query head j meets KV head floor(j * G / H); a view where H == G."""
    return t_BGSK.unsqueeze(2).expand(-1, -1, heads // t_BGSK.shape[1], -1, -1).flatten(1, 2)


def _over_group(t_BGRSK: Tensor) -> Tensor:
    return t_BGRSK.sum(2) if t_BGRSK.shape[2] > 1 else t_BGRSK.squeeze(2)


def dots(x_BGRSK: Tensor, slots: Sequence[Tensor]) -> Tensor:
    """Dot products [N, B, G, R, S] with every slot [B, G, 1, S, K]."""
    product = torch.empty_like(x_BGRSK)
    return torch.stack([torch.mul(x_BGRSK, slot, out=product).sum(-1) for slot in slots])


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, k: Tensor, v: Tensor, *depth: Tensor) -> Tensor:
        heads, groups = q.shape[1], k.shape[1]
        out, lse, ctx.extra = flash_forward(q, spread(k, heads), spread(v, heads), scale)
        dtype = torch.promote_types(q.dtype, torch.float32)
        wide_q, lse = (t.to(dtype).unflatten(1, (groups, -1)) for t in (q, lse))
        slots = [slot.unsqueeze(2) for slot in depth]
        keys, values = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        logits_NBGRS = dots(wide_q, keys) * scale
        joint_lse = torch.logaddexp(lse, torch.logsumexp(logits_NBGRS, 0))
        # out of place: selective recomputation keeps the kernel's output
        joint = out.unflatten(1, (groups, -1)) * (lse - joint_lse).exp().unsqueeze(-1)
        for p, value in zip((logits_NBGRS - joint_lse).exp().unsqueeze(-1), values, strict=True):
            joint.addcmul_(p, value)
        joint = joint.flatten(1, 2).to(q.dtype)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, joint, joint_lse.flatten(1, 2), *depth)
        return joint

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, joint, lse, *depth = ctx.saved_tensors
        heads, groups = q.shape[1], k.shape[1]
        dq, *dkv = _flash_backward(grad, q, spread(k, heads), spread(v, heads), joint, lse, ctx.scale, ctx.extra)
        dk, dv = (_over_group(t.unflatten(1, (groups, -1))) for t in dkv)
        wide_q, wide_grad, wide_dq = (t.to(lse.dtype).unflatten(1, (groups, -1)) for t in (q, grad, dq))
        joint, lse = (t.unflatten(1, (groups, -1)) for t in (joint, lse))
        slots = [slot.unsqueeze(2) for slot in depth]
        keys, values = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        p_NBGRS = (dots(wide_q, keys) * ctx.scale - lse).exp()
        dp_NBGRS = dots(wide_grad, values) - (wide_grad * joint).sum(-1)
        dlogits_NBGRS = p_NBGRS * dp_NBGRS * ctx.scale
        dkeys, dvalues = [], []
        for key, p, dlogit in zip(keys, p_NBGRS.unsqueeze(-1), dlogits_NBGRS.unsqueeze(-1), strict=True):
            wide_dq.addcmul_(dlogit, key)
            dkeys.append(_over_group(dlogit * wide_q).to(k.dtype))
            dvalues.append(_over_group(p * wide_grad).to(v.dtype))
        return None, wide_dq.flatten(1, 2).to(q.dtype), dk, dv, *dkeys, *dvalues


def joint_attention(q: Tensor, k: Tensor, v: Tensor, depth_k: Sequence[Tensor], depth_v: Sequence[Tensor]) -> Tensor:
    """Attention of q [B, H, S, K] over k, v [B, G, S, K] (causal) and over depth_k, depth_v (same token only).

    depth_k, depth_v: one [B, G, S, K] per slot, at least one. Query head j meets KV head floor(j * G / H). Scaled by
    1/sqrt(K). Returns [B, H, S, K].
    """
    out: Tensor = _JointAttention.apply(1 / math.sqrt(q.shape[-1]), q, k, v, *depth_k, *depth_v)
    return out
