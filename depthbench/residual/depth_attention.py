"""Softmax attention over depth, the read of Attention Residuals (arXiv 2603.15031, Eq. 2-6).

    e_j = <w * g, v_j> / sqrt(mean(v_j^2) + eps)        z = sum_j softmax(e)_j v_j

with a learned query w and key-norm gain g, per token. Keys are normalised, values are not; no 1/sqrt(D).

Shapes: S tokens, B microbatch, D hidden, N sources. Sources stay a list: stacking them at each read would make saved
activations quadratic in depth. Backward keeps references to the sources and two [N, S, B] scalars, and recomputes the
rest.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _DepthAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, query_D: Tensor, gain_D: Tensor, *sources_SBD: Tensor) -> Tensor:
        dtype = torch.promote_types(sources_SBD[0].dtype, torch.float32)
        w_D = query_D.to(dtype) * gain_D.to(dtype)
        shape_SB = sources_SBD[0].shape[:-1]
        rstd_NSB = torch.empty((len(sources_SBD), *shape_SB), dtype=dtype, device=w_D.device)
        logit_NSB = torch.empty_like(rstd_NSB)
        for n, source in enumerate(sources_SBD):
            v_SBD = source.to(dtype)
            torch.rsqrt(v_SBD.square().mean(-1) + eps, out=rstd_NSB[n])
            torch.mul(v_SBD @ w_D, rstd_NSB[n], out=logit_NSB[n])
        weight_NSB = torch.softmax(logit_NSB, 0)
        z_SBD = weight_NSB[0].unsqueeze(-1) * sources_SBD[0]
        for n in range(1, len(sources_SBD)):
            z_SBD.addcmul_(weight_NSB[n].unsqueeze(-1), sources_SBD[n].to(dtype))
        ctx.save_for_backward(query_D, gain_D, rstd_NSB, logit_NSB, *sources_SBD)
        return z_SBD.to(sources_SBD[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBD: Tensor) -> Any:
        query_D, gain_D, rstd_NSB, logit_NSB, *sources_SBD = ctx.saved_tensors
        dtype = rstd_NSB.dtype
        w_D = query_D.to(dtype) * gain_D.to(dtype)
        weight_NSB = torch.softmax(logit_NSB, 0)
        grad_SBD = grad_SBD.to(dtype)
        grad_weight_NSB = torch.stack([(grad_SBD * v.to(dtype)).sum(-1) for v in sources_SBD])
        mean_SB = (weight_NSB * grad_weight_NSB).sum(0)
        grad_logit_NSB = weight_NSB * (grad_weight_NSB - mean_SB)
        # e = <w, v> r with r = (mean v^2 + eps)^(-1/2):  de/dv = r w - e r^2 v / D
        towards_w_NSB = grad_logit_NSB * rstd_NSB
        towards_v_NSB = towards_w_NSB * logit_NSB * rstd_NSB / w_D.numel()
        grad_w_D = torch.zeros_like(w_D)
        grads: list[Tensor | None] = []
        for n, source in enumerate(sources_SBD):
            v_SBD = source.to(dtype)
            grad_w_D += towards_w_NSB[n].reshape(-1) @ v_SBD.reshape(-1, w_D.numel())
            if not ctx.needs_input_grad[3 + n]:
                grads.append(None)
                continue
            grad_v_SBD = weight_NSB[n].unsqueeze(-1) * grad_SBD
            grad_v_SBD.addcmul_(towards_w_NSB[n].unsqueeze(-1), w_D)
            grad_v_SBD.addcmul_(towards_v_NSB[n].unsqueeze(-1), v_SBD, value=-1)
            grads.append(grad_v_SBD.to(source.dtype))
        grad_query_D = (grad_w_D * gain_D.to(dtype)).to(query_D.dtype)
        grad_gain_D = (grad_w_D * query_D.to(dtype)).to(gain_D.dtype)
        return None, grad_query_D, grad_gain_D, *grads


def depth_attention(sources_SBD: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    """Mix sources by their softmax weights.

    Args:
        sources_SBD: N >= 1 tensors [S, B, D] of one dtype.
        query_D, gain_D: [D] each, in any dtype; only their product acts.
        eps: inside the root of the keys' RMS norm.

    Returns: [S, B, D] in the sources' dtype; statistics, softmax and sum in float32 or better. One source is returned
        as it is, with exactly zero gradient to query and gain.
    """
    mixed: Tensor = _DepthAttention.apply(eps, query_D, gain_D, *sources_SBD)
    return mixed
