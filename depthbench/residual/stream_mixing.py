"""The operations of residual streams (HC, mHC), each of which keeps for backward its arguments and per-token scalars:
written with plain operations they would keep several float32 copies of all n streams a sublayer.

Coefficients are in float32 or better, and so is every sum; streams and outputs are in the compute dtype.

Shapes: S tokens, B microbatch, N streams, D hidden, M columns of coefficients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_DM: Tensor, eps: float) -> Tensor:
        wide = x.to(weight_DM.dtype)
        rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        projected = weight_DM.new_empty((*x.shape[:-1], weight_DM.shape[-1]))
        torch.matmul(wide.flatten(0, -2), weight_DM, out=projected.flatten(0, -2))
        projected *= rstd
        ctx.save_for_backward(x, weight_DM, rstd, projected)
        return projected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight_DM, rstd, projected = ctx.saved_tensors
        wide = x.to(weight_DM.dtype)
        towards = (grad * rstd).flatten(0, -2)
        grad_weight_DM = (towards.T @ wide.flatten(0, -2)).T
        # m = (x W) r with r = (mean x^2 + eps)^(-1/2):  dm/dx = r W - m r^2 x / D
        grad_x = wide * ((grad * projected).sum(-1, keepdim=True) * rstd.square() / -x.shape[-1])
        grad_x.flatten(0, -2).addmm_(towards, weight_DM.T)
        return grad_x.to(x.dtype), grad_weight_DM, None


class _ReadStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams_SBND: Tensor, weight_SBN: Tensor) -> Tensor:
        ctx.save_for_backward(streams_SBND, weight_SBN)
        wide, weight = _flat(streams_SBND, weight_SBN.dtype), weight_SBN.flatten(0, 1).unsqueeze(1)
        read = wide.new_empty((len(wide), 1, wide.shape[-1]))
        torch.bmm(weight, wide, out=read)
        return read.view(*weight_SBN.shape[:2], -1).to(streams_SBND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBD: Tensor) -> Any:
        streams_SBND, weight_SBN = ctx.saved_tensors
        grad_SBD = grad_SBD.to(weight_SBN.dtype)
        grad_weight = torch.bmm(_flat(streams_SBND, weight_SBN.dtype), grad_SBD.flatten(0, 1).unsqueeze(-1))
        grad_streams_SBND = (weight_SBN.unsqueeze(-1) * grad_SBD.unsqueeze(-2)).to(streams_SBND.dtype)
        return grad_streams_SBND, grad_weight.view_as(weight_SBN)


class _WriteStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams_SBND: Tensor, mix_SBNN: Tensor, spread_SBN: Tensor, y_SBD: Tensor) -> Tensor:
        ctx.save_for_backward(streams_SBND, mix_SBNN, spread_SBN, y_SBD)
        dtype = mix_SBNN.dtype
        written = spread_SBN.unsqueeze(-1) * y_SBD.to(dtype).unsqueeze(-2)
        written.flatten(0, 1).baddbmm_(mix_SBNN.flatten(0, 1), _flat(streams_SBND, dtype))
        return written.to(streams_SBND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBND: Tensor) -> Any:
        streams_SBND, mix_SBNN, spread_SBN, y_SBD = ctx.saved_tensors
        dtype = mix_SBNN.dtype
        grad = _flat(grad_SBND, dtype)
        grad_mix = torch.bmm(grad, _flat(streams_SBND, dtype).mT)
        grad_streams = torch.bmm(mix_SBNN.flatten(0, 1).mT, grad).to(streams_SBND.dtype)
        grad_spread = torch.bmm(grad, y_SBD.to(dtype).flatten(0, 1).unsqueeze(-1))
        grad_y = torch.bmm(spread_SBN.flatten(0, 1).unsqueeze(1), grad).to(y_SBD.dtype)
        return (
            grad_streams.view_as(streams_SBND),
            grad_mix.view_as(mix_SBNN),
            grad_spread.view_as(spread_SBN),
            grad_y.view_as(y_SBD),
        )


def _flat(streams_SBND: Tensor, dtype: torch.dtype) -> Tensor:
    """[S B, N, D], a batch of matrices."""
    return streams_SBND.to(dtype).flatten(0, 1)


def rms_projection(x: Tensor, weight_DM: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) times a matrix, over the last axis: [..., D] -> [..., M], in the matrix's dtype."""
    projected: Tensor = _RMSProjection.apply(x, weight_DM, eps)
    return projected


def read_streams(streams_SBND: Tensor, weight_SBN: Tensor) -> Tensor:
    """sum_s weight_s H_s: [S, B, D], in the streams' dtype."""
    read: Tensor = _ReadStreams.apply(streams_SBND, weight_SBN)
    return read


def write_streams(streams_SBND: Tensor, mix_SBNN: Tensor, spread_SBN: Tensor, y_SBD: Tensor) -> Tensor:
    """H_t <- sum_s mix[t, s] H_s + spread_t y: [S, B, N, D], in the streams' dtype."""
    written: Tensor = _WriteStreams.apply(streams_SBND, mix_SBNN, spread_SBN, y_SBD)
    return written
