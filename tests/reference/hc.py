"""Dynamic Hyper-Connections with n streams H_0 .. H_(n-1), all starting as the embedding.

Per token, with R_s = H_s / sqrt(mean(H_s^2) + row_norm_eps) (no weight), for every sublayer:

    alpha[s, c] = static_alpha[s, c] + dynamic_alpha_scale * tanh(R_s . dynamic_alpha[:, c])      c = 0 .. n
    beta[s]     = static_beta[s]     + dynamic_beta_scale  * tanh(R_s . dynamic_beta)
    y   = F(N(sum_s alpha[s, 0] H_s))                                  column 0 reads the branch input
    H_t <- sum_s alpha[s, 1 + t] H_s + beta[t] y                       columns 1 .. n mix

    out = N(sum_s H_s)      (readout "sum_then_norm"), or sum_s N(H_s)      (readout "norm_then_sum")
"""

import torch
from torch import Tensor

from .layers import Shape, Weights, norm, rms_norm, sublayer, sublayer_name


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(dim=0)


def final_hidden(
    weights: Weights,
    embedding: Tensor,
    shape: Shape,
    *,
    num_streams: int = 4,
    eps: float = 1e-6,
    readout_eps: float | None = None,
    row_norm_eps: float = 1e-8,
    readout: str = "sum_then_norm",
) -> Tensor:
    n = num_streams
    streams = [embedding for _ in range(n)]
    for k in range(2 * shape.num_layers):
        name = f"{sublayer_name(k)}_residual"
        static_alpha, static_beta = weights[f"{name}.static_alpha"], weights[f"{name}.static_beta"]
        w_alpha, w_beta = weights[f"{name}.dynamic_alpha"], weights[f"{name}.dynamic_beta"]
        scale_alpha, scale_beta = weights[f"{name}.dynamic_alpha_scale"], weights[f"{name}.dynamic_beta_scale"]
        rows = [rms_norm(stream, row_norm_eps) for stream in streams]
        alpha = [static_alpha[s] + scale_alpha * torch.tanh(rows[s] @ w_alpha) for s in range(n)]  # each [B, T, n + 1]
        beta = [static_beta[s] + scale_beta * torch.tanh(rows[s] @ w_beta) for s in range(n)]  # each [B, T]
        branch_input = total([alpha[s][..., 0, None] * streams[s] for s in range(n)])
        y = sublayer(weights, k, norm(weights, f"{name}.norm", branch_input, eps), shape)
        mixed = [total([alpha[s][..., 1 + t, None] * streams[s] for s in range(n)]) for t in range(n)]
        streams = [mixed[t] + beta[t][..., None] * y for t in range(n)]
    last = eps if readout_eps is None else readout_eps
    if readout == "sum_then_norm":
        return norm(weights, "readout.norm", total(streams), last)
    if readout == "norm_then_sum":
        return total([norm(weights, "readout.norm", stream, last) for stream in streams])
    raise ValueError(f"readout is {readout!r}, must be 'sum_then_norm' or 'norm_then_sum'")
