"""MoDA: Pre-LN whose attention also looks at its own token's keys and values in earlier layers.

    h <- h + F_k(N_k(h)),    out = N(h)

    depth slot 2i     = (W_k x, W_v x)               x = N(h) of block i's attention; keys before RoPE
    depth slot 2i + 1 = (W_depth_k x, W_depth_v x)   x = N(h) of block i's MLP; the last block has none

Attention of block i at token t takes one softmax (scale 1/sqrt(K)) over {RoPE'd keys of tokens s <= t} and {unrotated
keys of slots 0 .. 2i - 1 at token t}, with the RoPE'd query for both, and averages the values accordingly.
"""

from torch import Tensor

from .layers import Shape, Weights, attention, linear, mlp, norm


def final_hidden(weights: Weights, embedding: Tensor, shape: Shape, *, eps: float = 1e-6) -> Tensor:
    h = embedding
    depth_keys: list[Tensor] = []
    depth_values: list[Tensor] = []
    for i in range(shape.num_layers):
        block = f"blocks.{i}"

        x = norm(weights, f"{block}.attention_residual.norm", h, eps)
        h = h + attention(weights, f"{block}.attention", x, shape, depth_keys, depth_values)
        depth_keys.append(linear(x, weights[f"{block}.attention.k.weight"]))
        depth_values.append(linear(x, weights[f"{block}.attention.v.weight"]))

        x = norm(weights, f"{block}.mlp_residual.norm", h, eps)
        h = h + mlp(weights, f"{block}.mlp", x)
        if i < shape.num_layers - 1:
            depth_keys.append(linear(x, weights[f"{block}.mlp_residual.depth_k.weight"]))
            depth_values.append(linear(x, weights[f"{block}.mlp_residual.depth_v.weight"]))
    return norm(weights, "readout.norm", h, eps)
