"""Sandwich-LN: Pre-LN with a second RMSNorm on the branch output.

    h <- h + N'_k(F_k(N_k(h)))        for every sublayer k
    out = N(h)

No norm on the embedding and no depth factor.
"""

from torch import Tensor

from .layers import Shape, Weights, norm, sublayer, sublayer_name


def final_hidden(
    weights: Weights, embedding: Tensor, shape: Shape, *, eps: float = 1e-6, post_norm_eps: float = 1e-6
) -> Tensor:
    h = embedding
    for k in range(2 * shape.num_layers):
        name = f"{sublayer_name(k)}_residual"
        y = sublayer(weights, k, norm(weights, f"{name}.norm", h, eps), shape)
        h = h + norm(weights, f"{name}.post_norm", y, post_norm_eps)
    return norm(weights, "readout.norm", h, eps)
