"""DeepNorm: Post-LN with an enlarged residual.

    h <- LN_k(alpha h + F_k(h))        alpha = (2 L)^(1/4) for L blocks; no norm before the branch
    out = N(h)

    LN(x) = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight        no bias

The readout norm N stays an RMSNorm.
"""

from torch import Tensor

from .layers import Shape, Weights, norm, rms_norm, sublayer, sublayer_name


def layer_norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return rms_norm(x - x.mean(dim=-1, keepdim=True), eps) * weights[f"{name}.weight"]


def final_hidden(weights: Weights, embedding: Tensor, shape: Shape, *, eps: float = 1e-6) -> Tensor:
    alpha = (2 * shape.num_layers) ** 0.25
    h = embedding
    for k in range(2 * shape.num_layers):
        y = sublayer(weights, k, h, shape)
        h = layer_norm(weights, f"{sublayer_name(k)}_residual.norm", alpha * h + y, eps)
    return norm(weights, "readout.norm", h, eps)
