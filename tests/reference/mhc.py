"""Manifold-Constrained Hyper-Connections with n streams H_0 .. H_(n-1), all starting as the embedding.

Per token, with x = (H_0, ..., H_(n-1)) laid end to end (stream * D + channel), for every sublayer:

    m       = x phi / sqrt(mean(x^2) + coefficient_eps)        columns: n of pre, n of post, n^2 of res (row by row)
    pre     = sigmoid(scale_pre m_pre + bias_pre)
    post    = 2 sigmoid(scale_post m_post + bias_post)
    R[t, s] = Sinkhorn(scale_res m_res + bias_res)             t the output stream, s the input stream
    y       = F(N(sum_s pre[s] H_s))
    H_t    <- sum_s R[t, s] H_s + post[t] y

    out = N(sum_s H_s / n)      (readout "mean_then_norm"), or N(sum_s H_s)      (readout "sum_then_norm")

Sinkhorn, rows first: a softmax of each row (fixed t), plus e in each entry; each column divided by its sum + e; then
each row by its sum + e and each column by its sum + e, sinkhorn_iterations - 1 times. e is sinkhorn_eps. The last step
leaves the column sums (over output streams) at 1 / (1 + e or so), so that the mean of the streams keeps what it had;
row sums are nearly 1. Columns first: the same with rows and columns exchanged throughout.
"""

import torch
from torch import Tensor

from .layers import Shape, Weights, norm, sublayer, sublayer_name

SUM_OVER = {"rows_first": (-1, -2), "columns_first": (-2, -1)}  # of [..., t, s]: a row's sum is over s


def sinkhorn(logits: Tensor, iterations: int, order: str = "rows_first", eps: float = 1e-6) -> Tensor:
    """[..., output stream, input stream] to the same."""
    first, second = SUM_OVER[order]
    matrix = torch.softmax(logits, dim=first) + eps
    matrix = matrix / (matrix.sum(dim=second, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(dim=first, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=second, keepdim=True) + eps)
    return matrix


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(dim=0)


def coefficients(
    weights: Weights, name: str, streams: list[Tensor], coefficient_eps: float, sinkhorn_options: tuple[int, str, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [B, T, n], post [B, T, n] and R [B, T, n, n]."""
    n = len(streams)
    x = torch.cat(streams, dim=-1)
    m = (x @ weights[f"{name}.phi"]) / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + coefficient_eps)
    bias = weights[f"{name}.bias"]
    pre = torch.sigmoid(weights[f"{name}.scale_pre"] * m[..., :n] + bias[:n])
    post = 2 * torch.sigmoid(weights[f"{name}.scale_post"] * m[..., n : 2 * n] + bias[n : 2 * n])
    res = weights[f"{name}.scale_res"] * m[..., 2 * n :] + bias[2 * n :]
    return pre, post, sinkhorn(res.unflatten(-1, (n, n)), *sinkhorn_options)


def final_hidden(
    weights: Weights,
    embedding: Tensor,
    shape: Shape,
    *,
    num_streams: int = 4,
    eps: float = 1e-6,
    readout_eps: float | None = None,
    coefficient_eps: float = 1e-6,
    sinkhorn_iterations: int = 20,
    sinkhorn_order: str = "rows_first",
    sinkhorn_eps: float = 1e-6,
    readout: str = "mean_then_norm",
) -> Tensor:
    n, sinkhorn_options = num_streams, (sinkhorn_iterations, sinkhorn_order, sinkhorn_eps)
    streams = [embedding for _ in range(n)]
    for k in range(2 * shape.num_layers):
        name = f"{sublayer_name(k)}_residual"
        pre, post, r = coefficients(weights, name, streams, coefficient_eps, sinkhorn_options)
        branch_input = total([pre[..., s, None] * streams[s] for s in range(n)])
        y = sublayer(weights, k, norm(weights, f"{name}.norm", branch_input, eps), shape)
        mixed = [total([r[..., t, s, None] * streams[s] for s in range(n)]) for t in range(n)]
        streams = [mixed[t] + post[..., t, None] * y for t in range(n)]
    last = eps if readout_eps is None else readout_eps
    if readout == "mean_then_norm":
        return norm(weights, "readout.norm", total(streams) / n, last)
    if readout == "sum_then_norm":
        return norm(weights, "readout.norm", total(streams), last)
    raise ValueError(f"readout is {readout!r}, must be 'mean_then_norm' or 'sum_then_norm'")
