"""What all architectures share: RMSNorm, RoPE, causal (grouped-query) attention, SwiGLU.

    N(x)      = x / sqrt(mean(x^2) + eps) * weight
    RoPE      rotates the pair (a_i, b_i) = (x[i], x[K/2 + i]) of position t by the angle t * theta^(-2i / K)
    Attention softmax of q.k / sqrt(K) over positions s <= t; query head j reads key/value head floor(j * Hkv / H)
    MLP(x)    = W_down (silu(W_gate x) * W_up x)

Shapes: B batch, T tokens, D hidden, F ffn, V vocabulary, H query heads, Hkv key/value heads, K head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float = 10000.0
    tied: bool = False


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """weight is [out, in]."""
    return x @ weight.T


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return rms_norm(x, eps) * weights[f"{name}.weight"]


def rope(x: Tensor, theta: float) -> Tensor:
    """Rotate one head's [B, T, K]."""
    tokens, half = x.shape[1], x.shape[2] // 2
    position = torch.arange(tokens, dtype=x.dtype)
    frequency = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = position[:, None] * frequency[None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def attention(
    weights: Weights,
    name: str,
    x: Tensor,
    shape: Shape,
    depth_keys: Sequence[Tensor] = (),
    depth_values: Sequence[Tensor] = (),
) -> Tensor:
    """Causal attention; depth keys and values (MoDA, a list of [B, T, Hkv * K]) join the softmax at their own token."""
    size, tokens = shape.head_dim, x.shape[1]
    q, k, v = (linear(x, weights[f"{name}.{part}.weight"]) for part in ("q", "k", "v"))
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)
    heads = []
    for head in range(shape.num_heads):
        kv_head = head * shape.num_kv_heads // shape.num_heads
        of_query = slice(head * size, (head + 1) * size)
        of_key = slice(kv_head * size, (kv_head + 1) * size)
        query, value = rope(q[..., of_query], shape.rope_theta), v[..., of_key]
        key = rope(k[..., of_key], shape.rope_theta)
        over_sequence = (query @ key.transpose(1, 2)).masked_fill(future, float("-inf"))  # [B, T, T]
        over_depth = [(query * slot[..., of_key]).sum(dim=-1, keepdim=True) for slot in depth_keys]  # each [B, T, 1]
        p = torch.softmax(torch.cat([over_sequence, *over_depth], dim=-1) / size**0.5, dim=-1)
        out = p[..., :tokens] @ value
        for index, slot in enumerate(depth_values):
            out = out + p[..., tokens + index, None] * slot[..., of_key]
        heads.append(out)
    return linear(torch.cat(heads, dim=-1), weights[f"{name}.out.weight"])


def mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    gate, up = linear(x, weights[f"{name}.gate.weight"]), linear(x, weights[f"{name}.up.weight"])
    return linear(gate * torch.sigmoid(gate) * up, weights[f"{name}.down.weight"])


def sublayer_name(k: int) -> str:
    """Sublayer k = 2 * block (attention) or 2 * block + 1 (MLP)."""
    return f"blocks.{k // 2}.{('attention', 'mlp')[k % 2]}"


def sublayer(weights: Weights, k: int, x: Tensor, shape: Shape) -> Tensor:
    """Raw output of sublayer k for an already normalised input."""
    name = sublayer_name(k)
    return attention(weights, name, x, shape) if k % 2 == 0 else mlp(weights, name, x)
