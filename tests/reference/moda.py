"""MoDA: attention also looks at its own token's keys and values in earlier layers.

    norm "pre":     h <- h + F_k(x),  x = N_k(h)            norm "post":    h <- N_k(h + F_k(x)),  x = h
    out = N(h)      in both

    depth slot 2i     = (W_k x, W_v x)               x is the input of block i's attention; keys before RoPE
    depth slot 2i + 1 = (W_depth_k x, W_depth_v x)   x is the input of block i's MLP; the last block has none

Attention of block i at token t takes one softmax (scale 1/sqrt(K)) over {RoPE'd keys of tokens s <= t} and {unrotated
keys of slots 0 .. 2i - 1 at token t}, with the RoPE'd query for both, and averages the values accordingly.
"""

from torch import Tensor

from .layers import Shape, Weights, attention, linear, mlp, rms_norm


def final_hidden(weights: Weights, embedding: Tensor, shape: Shape, *, eps: float = 1e-6, norm: str = "pre") -> Tensor:
    if norm not in ("pre", "post"):
        raise ValueError(f"norm is {norm!r}, must be 'pre' or 'post'")

    def normalised(name: str, x: Tensor) -> Tensor:
        return rms_norm(x, eps) * weights[f"{name}.norm.weight"]

    h = embedding
    depth_keys: list[Tensor] = []
    depth_values: list[Tensor] = []
    for i in range(shape.num_layers):
        block = f"blocks.{i}"

        x = normalised(f"{block}.attention_residual", h) if norm == "pre" else h
        y = attention(weights, f"{block}.attention", x, shape, depth_keys, depth_values)
        h = h + y if norm == "pre" else normalised(f"{block}.attention_residual", h + y)
        depth_keys.append(linear(x, weights[f"{block}.attention.k.weight"]))
        depth_values.append(linear(x, weights[f"{block}.attention.v.weight"]))

        x = normalised(f"{block}.mlp_residual", h) if norm == "pre" else h
        y = mlp(weights, f"{block}.mlp", x)
        h = h + y if norm == "pre" else normalised(f"{block}.mlp_residual", h + y)
        if i < shape.num_layers - 1:
            depth_keys.append(linear(x, weights[f"{block}.mlp_residual.depth_k.weight"]))
            depth_values.append(linear(x, weights[f"{block}.mlp_residual.depth_v.weight"]))
    return normalised("readout", h)
