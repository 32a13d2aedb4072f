"""Pre-LN.

    h <- h + F_k(N_k(h))        for every sublayer k (attention, MLP, attention, ...)
    out = N(h)

F_k is the attention or the MLP, N_k an RMSNorm with its own weight.
"""

from torch import Tensor

from .layers import Shape, Weights, norm, sublayer, sublayer_name


def final_hidden(weights: Weights, embedding: Tensor, shape: Shape, *, eps: float = 1e-6) -> Tensor:
    h = embedding
    for k in range(2 * shape.num_layers):
        h = h + sublayer(weights, k, norm(weights, f"{sublayer_name(k)}_residual.norm", h, eps), shape)
    return norm(weights, "readout.norm", h, eps)
