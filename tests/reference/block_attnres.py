"""Block Attention Residuals; Full is sublayers_per_block = 1.

A depth read with query w and key-norm weight g over sources v_0, v_1, ... is, per token,

    e_j = w . (g * v_j / sqrt(mean(v_j^2) + key_norm_eps)) / temperature,    p = softmax_j(e),    z = sum_j p_j v_j

(without key norm e_j = w . v_j / temperature, and there is no g) and sublayer k computes y_k = F_k(N_k(z_k)). Sources
are the embedding, the sum of raw outputs y of every finished block of sublayers_per_block sublayers, and the running
sum of the block begun (absent while that is empty, never zeros). There is no residual addition. Sublayer 0 takes the
embedding as it is; out = N(one last read over all sources). N adds norm_eps inside its root, or, if that is meant for
the sum of the sources (norm_eps_of_sum), norm_eps over their number squared.
"""

import torch
from torch import Tensor

from .layers import Shape, Weights, norm, sublayer, sublayer_name


def depth_read(sources: list[Tensor], keys: list[Tensor], query: Tensor, temperature: float) -> Tensor:
    scores = [(key * query).sum(dim=-1) / temperature for key in keys]
    p = torch.softmax(torch.stack(scores, dim=-1), dim=-1)  # [B, T, number of sources]
    mixed = torch.zeros_like(sources[0])
    for j, v in enumerate(sources):
        mixed = mixed + p[..., j, None] * v
    return mixed


def final_hidden(
    weights: Weights,
    embedding: Tensor,
    shape: Shape,
    *,
    sublayers_per_block: int,
    key_norm_eps: float = 1e-5,
    norm_eps: float = 1e-5,
    norm_eps_of_sum: bool = False,
    first_norm_eps: float = 1e-6,
    temperature: float = 1.0,
    key_norm: bool = True,
) -> Tensor:
    def read(sources: list[Tensor], name: str) -> Tensor:
        keys = [norm(weights, f"{name}.key_norm", v, key_norm_eps) for v in sources] if key_norm else sources
        return depth_read(sources, keys, weights[f"{name}.query"], temperature)

    def eps(sources: list[Tensor]) -> float:
        return norm_eps / len(sources) ** 2 if norm_eps_of_sum else norm_eps

    finished, running = [embedding], None
    for k in range(2 * shape.num_layers):
        name = f"{sublayer_name(k)}_residual"
        if k == 0:
            x = norm(weights, f"{name}.norm", embedding, first_norm_eps)
        else:
            sources = finished if running is None else [*finished, running]
            x = norm(weights, f"{name}.norm", read(sources, name), eps(sources))
        y = sublayer(weights, k, x, shape)
        running = y if running is None else running + y
        if (k + 1) % sublayers_per_block == 0:
            finished, running = [*finished, running], None
    sources = finished if running is None else [*finished, running]
    return norm(weights, "readout.norm", read(sources, "readout"), eps(sources))
