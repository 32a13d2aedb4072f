"""Softmax attention over depth, the read of Attention Residuals (arXiv 2603.15031, Eq. 2-6 and Algorithm 1).

    e_j = <w, v_j> / sqrt(mean(v_j^2) + eps)        z = sum_j softmax(e)_j v_j

with a learned w, per token. Keys are normalised, values are not; no 1/sqrt(D).

In two phases: w does not depend on activations, so the reads of several sublayers over the sources they share can be
done at once (`attend_ahead`), each source being read once instead of once a sublayer; each sublayer then merges its
result with the sources that came later (`depth_attention` with `ahead`). The split is exact: the merged softmax gives
what was attended ahead the weight of its log-sum-exp.

Shapes: S tokens, B microbatch, T = S B of a tile, D hidden, N sources, Q queries. Sources stay a list: stacking them
at each read would make saved activations quadratic in depth. Backward keeps references to the sources and per-token
scalars, and recomputes the rest; all sums run in one order, so gradients repeat bit by bit.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}  # of stacked sources: a part of a CPU's L3; what a GPU can spare


class Ahead(NamedTuple):
    """What one query found in the first `num_sources` sources: their mixture [S, B, D] and log-sum-exp [S, B], in
    float32 or better. Good for one `depth_attention`: the two gradients that it sends back only make sense together."""

    w_D: Tensor
    mixed_SBD: Tensor
    lse_SB: Tensor
    num_sources: int
    dtype: torch.dtype  # of the sources


def _inverse_rms(v: Tensor, eps: float | None) -> Tensor:
    """1 / sqrt(mean(v^2) + eps) over the last axis; 1 without a norm."""
    if eps is None:
        return v.new_ones(v.shape[:-1])
    return torch.linalg.vector_norm(v, dim=-1).square_().div_(v.shape[-1]).add_(eps).rsqrt_()


class _DepthAttention(torch.autograd.Function):
    """One query over a list of sources and, at place 0 of the softmax, what was attended ahead."""

    @staticmethod
    def forward(
        ctx: Any,
        eps: float | None,
        returned: torch.dtype,
        w_D: Tensor,
        mixed_SBD: Tensor | None,
        lse_SB: Tensor | None,
        *sources: Tensor,
    ) -> Tensor:
        dtype = w_D.dtype
        parts = sources if mixed_SBD is None else (mixed_SBD, *sources)
        first = len(parts) - len(sources)
        rstd_NSB = w_D.new_empty((len(sources), *parts[0].shape[:-1]))
        logit_NSB = w_D.new_empty((len(parts), *parts[0].shape[:-1]))
        if lse_SB is not None:
            logit_NSB[0] = lse_SB
        for n, source in enumerate(sources):
            v_SBD = source.to(dtype)
            rstd_NSB[n] = _inverse_rms(v_SBD, eps)
            torch.mul(v_SBD @ w_D, rstd_NSB[n], out=logit_NSB[first + n])
        weight_NSB1 = torch.softmax(logit_NSB, 0).unsqueeze(-1)
        z_SBD = weight_NSB1[0] * parts[0]
        for weight_SB1, part in zip(weight_NSB1[1:], parts[1:], strict=True):
            z_SBD.addcmul_(weight_SB1, part.to(dtype))
        z_SBD = z_SBD.to(returned)
        ctx.eps, ctx.first = eps, first
        # with a mixture ahead, z (which the norm that follows keeps anyway) spares keeping that mixture
        ctx.save_for_backward(w_D, rstd_NSB, logit_NSB, z_SBD if first else None, *sources)
        return z_SBD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SBD: Tensor) -> Any:
        w_D, rstd_NSB, logit_NSB, z_SBD, *sources = ctx.saved_tensors
        dtype, first = w_D.dtype, ctx.first
        weight_NSB = torch.softmax(logit_NSB, 0)
        grad_SBD = grad_SBD.to(dtype)
        grad_weight_NSB = torch.empty_like(rstd_NSB)
        for n, source in enumerate(sources):
            grad_weight_NSB[n] = (grad_SBD * source.to(dtype)).sum(-1)
        grad_mixed_SBD: Tensor | None = None
        grad_lse_SB: Tensor | None = None
        if first:
            mean_SB = (grad_SBD * z_SBD.to(dtype)).sum(-1)
            grad_mixed_SBD = weight_NSB[0].unsqueeze(-1) * grad_SBD  # these two: see _AttendAhead
            grad_lse_SB = -weight_NSB[0] * mean_SB
        else:
            mean_SB = (weight_NSB * grad_weight_NSB).sum(0)
        grad_logit_NSB = weight_NSB[first:] * (grad_weight_NSB - mean_SB)
        # e = <w, v> r with r = (mean v^2 + eps)^(-1/2):  de/dv = r w - e r^2 v / D
        towards_w_NSB = grad_logit_NSB * rstd_NSB
        towards_v_NSB = towards_w_NSB * logit_NSB[first:] * rstd_NSB / w_D.numel()
        grad_w_D = torch.zeros_like(w_D)
        grads: list[Tensor | None] = []
        for n, source in enumerate(sources):
            v_SBD = source.to(dtype)
            grad_w_D += towards_w_NSB[n].reshape(-1) @ v_SBD.reshape(-1, w_D.numel())
            if not ctx.needs_input_grad[5 + n]:
                grads.append(None)
                continue
            grad_v_SBD = weight_NSB[first + n].unsqueeze(-1) * grad_SBD
            grad_v_SBD.addcmul_(towards_w_NSB[n].unsqueeze(-1), w_D)
            if ctx.eps is not None:
                grad_v_SBD.addcmul_(towards_v_NSB[n].unsqueeze(-1), v_SBD, value=-1)
            grads.append(grad_v_SBD.to(source.dtype))
        return None, None, grad_w_D, grad_mixed_SBD, grad_lse_SB, *grads


class _AttendAhead(torch.autograd.Function):
    """Several queries over one list of sources. Tokens go in tiles, whose sources are stacked for batched matmuls
    (with `out=`, so that selective recomputation, which keeps what plain matmuls return, keeps nothing of them).

    With z = p o + ... the merged output of a query, g its gradient and o, p its mixture ahead and that one's weight,
    the logit of source n ahead gets p P_n (<g, v_n> - <g, z>). So the merge sends p g as the gradient of o and, as
    that of the log-sum-exp, -p <g, z>: it holds z, and nobody then needs to have kept o.
    """

    @staticmethod
    def forward(ctx: Any, eps: float | None, num_queries: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        w_QD, sources = torch.stack(tensors[:num_queries]), tensors[num_queries:]
        shape_SB, width = sources[0].shape[:-1], sources[0].shape[-1]
        flat = [source.reshape(-1, width) for source in sources]
        mixed = [w_QD.new_empty(flat[0].shape) for _ in range(num_queries)]
        rstd_TN = w_QD.new_empty((len(flat[0]), len(flat)))
        logit_TNQ = w_QD.new_empty((*rstd_TN.shape, num_queries))
        lse_TQ = w_QD.new_empty((len(flat[0]), num_queries))
        for rows, v_TND in _tiles(flat, w_QD):
            rstd_TN[rows] = _inverse_rms(v_TND, eps)
            torch.matmul(v_TND.flatten(0, 1), w_QD.T, out=logit_TNQ[rows].flatten(0, 1))
            logit_TNQ[rows] *= rstd_TN[rows].unsqueeze(-1)
            lse_TQ[rows] = torch.logsumexp(logit_TNQ[rows], 1)  # whose inner copy is a tile's
            weight_TQN = torch.softmax(logit_TNQ[rows], 1).mT
            mixed_TQD = w_QD.new_empty((*weight_TQN.shape[:2], width))
            torch.bmm(weight_TQN, v_TND, out=mixed_TQD)
            for q in range(num_queries):
                mixed[q][rows] = mixed_TQD[:, q]
        ctx.eps = eps
        ctx.save_for_backward(w_QD, rstd_TN, logit_TNQ, *sources)
        return *(o.view(*shape_SB, width) for o in mixed), *(lse.reshape(shape_SB) for lse in lse_TQ.unbind(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        w_QD, rstd_TN, logit_TNQ, *sources = ctx.saved_tensors
        num_queries, width = w_QD.shape
        grad_mixed = [grad.reshape(-1, width) for grad in grads[:num_queries]]
        shift_TQ = torch.stack([grad.reshape(-1) for grad in grads[num_queries:]], 1)
        flat = [source.reshape(-1, width) for source in sources]
        grad_sources = [torch.empty_like(source) for source in flat]
        grad_w_QD = torch.zeros_like(w_QD)
        for (rows, v_TND), (_, grad_TQD) in zip(
            _tiles(flat, w_QD), _tiles(grad_mixed, w_QD, sources=len(flat)), strict=True
        ):
            weight_TNQ = torch.softmax(logit_TNQ[rows], 1)
            towards_w_TNQ = v_TND @ grad_TQD.mT
            towards_w_TNQ.add_(shift_TQ[rows].unsqueeze(1)).mul_(weight_TNQ).mul_(rstd_TN[rows].unsqueeze(-1))
            grad_w_QD.addmm_(towards_w_TNQ.flatten(0, 1).T, v_TND.flatten(0, 1))
            if ctx.eps is None:
                v_TND.zero_()
            else:
                towards_v_TN = (towards_w_TNQ * logit_TNQ[rows]).sum(-1).mul_(rstd_TN[rows])
                v_TND.mul_(towards_v_TN.div_(-width).unsqueeze(-1))
            v_TND.flatten(0, 1).addmm_(towards_w_TNQ.flatten(0, 1), w_QD)
            v_TND.baddbmm_(weight_TNQ, grad_TQD)
            for n, grad in enumerate(grad_sources):
                grad[rows] = v_TND[:, n]
        shaped = (grad.view_as(source) for grad, source in zip(grad_sources, sources, strict=True))
        return None, None, *grad_w_QD.unbind(0), *shaped


def _tiles(parts: Sequence[Tensor], like: Tensor, sources: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a tile and `parts` [T, D] stacked there [T, N, D], in `like`'s dtype; one buffer, filled again and
    again. Tiles are cut for `sources` parts, or for those given."""
    count, width = parts[0].shape
    row_bytes = (sources or len(parts)) * width * like.element_size()
    size = max(1, min(count, TILE_BYTES.get(like.device.type, 1 << 23) // row_bytes))
    buffer_TND = like.new_empty((size, len(parts), width))
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        tile_TND = buffer_TND[: rows.stop - start]
        for n, part in enumerate(parts):
            tile_TND[:, n] = part[rows]
        yield rows, tile_TND


def _wide(w_D: Tensor, dtype: torch.dtype) -> Tensor:
    return w_D.to(torch.promote_types(dtype, torch.float32))


def depth_attention(
    sources_SBD: Sequence[Tensor], w_D: Tensor, eps: float | None, ahead: Ahead | None = None
) -> Tensor:
    """Mix sources by their softmax weights.

    Args:
        sources_SBD: N >= 1 tensors [S, B, D] of one dtype; N >= 0 if something was attended ahead.
        w_D: [D], in any dtype: the query, times the keys' gain, over the temperature. That of `ahead` where given.
        eps: inside the root of the keys' RMS norm; None for keys that are not normalised.
        ahead: the same query's result over sources that came before these.

    Returns: [S, B, D] in the sources' dtype; statistics, softmax and sum in float32 or better. One source is returned
        as it is, with exactly zero gradient to w.
    """
    if ahead is None:
        dtype = sources_SBD[0].dtype
        mixed: Tensor = _DepthAttention.apply(eps, dtype, _wide(w_D, dtype), None, None, *sources_SBD)
    else:
        mixed = _DepthAttention.apply(eps, ahead.dtype, ahead.w_D, ahead.mixed_SBD, ahead.lse_SB, *sources_SBD)
    return mixed


def attend_ahead(sources_SBD: Sequence[Tensor], queries_D: Sequence[Tensor], eps: float | None) -> list[Ahead]:
    """The first phase for Q queries (as `w_D` above) that will all read these N >= 1 sources."""
    dtype = sources_SBD[0].dtype
    wide = [_wide(w_D, dtype) for w_D in queries_D]
    found = _AttendAhead.apply(eps, len(wide), *wide, *sources_SBD)
    mixed, lses = found[: len(wide)], found[len(wide) :]
    return [Ahead(w, o, lse, len(sources_SBD), dtype) for w, o, lse in zip(wide, mixed, lses, strict=True)]
