"""LayerNorm Scaling: Pre-LN whose branch inputs shrink with depth.

h <- h + F_k(N_k(h) / sqrt(l))        l = 1, 2, ... is the block of sublayer k, the same for attention and MLP
out = N(h)
"""

import math

from torch import Tensor

from .layers import Shape, Weights, norm, sublayer, sublayer_name


def final_hidden(weights: Weights, embedding: Tensor, shape: Shape, *, eps: float = 1e-6) -> Tensor:
    h = embedding
    for k in range(2 * shape.num_layers):
        block_number = k // 2 + 1
        x = norm(weights, f"{sublayer_name(k)}_residual.norm", h, eps) / math.sqrt(block_number)
        h = h + sublayer(weights, k, x, shape)
    return norm(weights, "readout.norm", h, eps)
