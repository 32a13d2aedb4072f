"""Causal attention with one softmax over the sequence and, at each query's own token, over keys of earlier depth.

MoDA (arXiv 2603.15619). The sequence part runs through torch's flash kernel, which also returns its log-sum-exp; the
depth part is merged by it. A flash backward computes P = exp(QK - lse) and delta = <dO, O>; given the *joint* output
and log-sum-exp it yields exactly the joint softmax's gradients for the sequence part, so no second kernel is needed.
CUDA has no such kernel for float32 and float64: there the same runs in plain matmuls, with all scores in memory.

Shapes: B microbatch, H heads, S sequence, K head dim; depth keys and values come with their KV heads repeated to H.
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


def _plain_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores: Tensor = (q @ k.mT) * scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(future, float("-inf"))


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = _plain_scores(q, k, scale)
    lse = torch.logsumexp(scores, -1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = (_plain_scores(q, k, scale) - lse.unsqueeze(-1)).exp()
    dscore = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    return dscore @ k, dscore.mT @ q, p.mT @ grad


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output, log-sum-exp [B, H, S] and what the backward kernel wants besides."""
    if not _has_kernel(q):
        return *_plain_forward(q, k, v, scale), ()
    if q.is_cuda:
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True, scale=scale
        )
        return out, lse, (cum_q, cum_k, max_q, max_k, seed, offset)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return out, lse, ()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, extra: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    if not _has_kernel(q):
        return _plain_backward(grad, q, k, v, out, lse, scale)
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = extra
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
        )
        return dq, dk, dv
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, True, scale=scale
    )
    return dq, dk, dv


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: float, q: Tensor, k: Tensor, v: Tensor, *depth: Tensor) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        keys, values = depth[: len(depth) // 2], depth[len(depth) // 2 :]
        out, lse, ctx.extra = _flash_forward(q, k, v, scale)
        wide_q = q.to(dtype)
        logits_NBHS = torch.stack([(wide_q * key.to(dtype)).sum(-1) for key in keys]) * scale
        joint_lse = torch.logaddexp(lse.to(dtype), torch.logsumexp(logits_NBHS, 0))
        joint = (lse.to(dtype) - joint_lse).exp().unsqueeze(-1) * out.to(dtype)
        for logit, value in zip(logits_NBHS, values, strict=True):
            joint.addcmul_((logit - joint_lse).exp().unsqueeze(-1), value.to(dtype))
        joint = joint.to(q.dtype)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, joint, joint_lse, *depth)
        return joint

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, joint, lse, *depth = ctx.saved_tensors
        keys, values = depth[: len(depth) // 2], depth[len(depth) // 2 :]
        dq, dk, dv = _flash_backward(grad, q, k, v, joint, lse.to(_lse_dtype(q)), ctx.scale, ctx.extra)
        dtype = lse.dtype
        wide_q, wide_grad, wide_dq = q.to(dtype), grad.to(dtype), dq.to(dtype)
        delta = (wide_grad * joint.to(dtype)).sum(-1)
        dkeys, dvalues = [], []
        for key, value in zip(keys, values, strict=True):
            p = ((wide_q * key.to(dtype)).sum(-1) * ctx.scale - lse).exp()
            dlogit = (p * ((wide_grad * value.to(dtype)).sum(-1) - delta) * ctx.scale).unsqueeze(-1)
            wide_dq = wide_dq + dlogit * key.to(dtype)
            dkeys.append((dlogit * wide_q).to(key.dtype))
            dvalues.append((p.unsqueeze(-1) * wide_grad).to(value.dtype))
        return None, wide_dq.to(q.dtype), dk, dv, *dkeys, *dvalues


def _lse_dtype(q: Tensor) -> torch.dtype:
    """The kernels keep the log-sum-exp in float32, in float64 for float64 queries."""
    return torch.promote_types(q.dtype, torch.float32)


def joint_attention(q: Tensor, k: Tensor, v: Tensor, depth_k: Sequence[Tensor], depth_v: Sequence[Tensor]) -> Tensor:
    """Attention of q [B, H, S, K] over k, v [B, H, S, K] (causal) and over depth_k, depth_v (same token only).

    depth_k, depth_v: one [B, H, S, K] per slot, at least one. Scaled by 1/sqrt(K). Returns [B, H, S, K].
    """
    size = q.shape[-1]
    # the CUDA kernel wants head sizes in multiples of 8; zeros change nothing
    padding = -size % 8 if q.is_cuda and _has_kernel(q) else 0
    tensors = [F.pad(t, (0, padding)) if padding else t for t in (q, k, v, *depth_k, *depth_v)]
    out: Tensor = _JointAttention.apply(1 / math.sqrt(size), *tensors)
    return out[..., :size] if padding else out
