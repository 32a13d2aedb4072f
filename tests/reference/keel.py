"""KEEL: Post-LN with an enlarged residual and a norm before each branch too.

    h <- h + F_0(N_0(h))                        block 0 attention: plain Pre-LN
    h <- N'_1(h + F_1(N_1(h)))                  block 0 MLP: alpha is 1
    h <- N'_k(alpha h + F_k(N_k(h)))            k = 2, 3, ...: alpha = 2 L, the number of sublayers
    out = N(h)

All norms are RMSNorms; those of a sum, N', have the eps post_norm_eps.
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
        if k == 0:
            h = h + y
        elif k == 1:
            h = norm(weights, f"{name}.post_norm", h + y, post_norm_eps)
        else:
            h = norm(weights, f"{name}.post_norm", 2 * shape.num_layers * h + y, post_norm_eps)
    return norm(weights, "readout.norm", h, eps)
