"""Attention of depthbench's Hugging Face models: grouped queries, RoPE, transformers' attention interface, and a joint
softmax over the sequence and over depth.

Shapes: B batch, S tokens of this call, T tokens with the cached ones, D hidden, H heads, G KV heads, R heads a group,
K head dim.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from depthbench.model.depth_sdpa import joint_attention
from depthbench.model.rope_scaling import RopeScaling, inverse_frequencies
from depthbench.residual.protocol import DepthKV

from .configuration_depthbench import DepthBenchConfig

Rotation = tuple[Tensor, Tensor]
_CACHE_IS_TOLD_PLACES = "cache_kwargs" in inspect.signature(Cache.update).parameters  # transformers 4


def rotation(config: DepthBenchConfig, positions_BS: Tensor, dtype: torch.dtype) -> Rotation:
    """Cosines and sines [B, S, 1, K/2], in float32 or better. Not kept: a buffer that a checkpoint does not hold comes
    back as garbage, since models are built on the meta device."""
    scaling = RopeScaling(**config.position_scaling) if config.position_scaling else None
    frequencies, factor = inverse_frequencies(config.head_dim, config.rope_theta, scaling)
    exact = torch.float32 if positions_BS.device.type == "mps" else torch.float64
    frequencies = frequencies.to(exact).to(positions_BS.device)
    angles = (positions_BS[..., None].to(exact) * frequencies).unsqueeze(-2)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().mul(factor).to(wide), angles.sin().mul(factor).to(wide)


def rotate(x_BSHK: Tensor, by: Rotation) -> Tensor:
    cos, sin = by
    a, b = x_BSHK.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BSHK.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[B, G, R, S, T] of q [B, G, R, S, K] and k [B, G, T, K]; without a mask all of k is seen."""
    scores = (q @ k.unsqueeze(2).mT) * scale
    if mask is None:
        return scores
    mask = mask[..., : k.shape[-2]].unsqueeze(2)  # one head's mask serves all
    return scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask


def eager_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """transformers' attention interface in plain matmuls: q [B, H, S, K], k and v [B, G, T, K] to [B, S, H, K]."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.softmax(_scores(grouped, k, mask, scaling), -1, dtype=wide).to(q.dtype)
    out = (weights @ v.unsqueeze(2)).flatten(1, 2)
    return out.transpose(1, 2).contiguous(), weights.flatten(1, 2)


def depth_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, depth: DepthKV, scale: float) -> Tensor:
    """One softmax over the sequence and, at each query's own token, over depth's slots [B, S, G, K].

    q [B, H, S, K], k and v [B, G, T, K]; returns [B, S, H, K].
    """
    slots_k, slots_v = ([slot.transpose(1, 2) for slot in slots] for slots in depth)
    new = q.shape[-2]
    if mask is None and new > 1:  # transformers' way to say causal, from the first key on; a static cache is longer
        return joint_attention(q, k[:, :, :new], v[:, :, :new], slots_k, slots_v).transpose(1, 2)
    wide = torch.promote_types(q.dtype, torch.float32)
    q_BGRSK = q.unflatten(1, (k.shape[1], -1)).to(wide)
    over_sequence = _scores(q_BGRSK, k.to(wide), mask, scale)
    over_depth = [(q_BGRSK * slot.unsqueeze(2)).sum(-1, keepdim=True) * scale for slot in slots_k]
    weights = torch.softmax(torch.cat([over_sequence, *over_depth], -1), -1)
    out = weights[..., : k.shape[-2]] @ v.unsqueeze(2).to(wide)
    for number, slot in enumerate(slots_v, k.shape[-2]):
        out = out + weights[..., number, None] * slot.unsqueeze(2)
    return out.flatten(1, 2).to(q.dtype).transpose(1, 2)


class DepthBenchAttention(nn.Module):
    def __init__(self, config: DepthBenchConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        # read by transformers' attention functions
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        width, inner = config.hidden_size, config.num_attention_heads * self.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        rotation: Rotation,
        mask: Tensor | None,
        depth: DepthKV | None,
        cache: Cache | None,
        places: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The branch's output and its taps: keys before RoPE and values, [B, S, G, K]. places [S]: in the cache."""
        q, keys, values = (
            projection(x_BSD).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, rotation), rotate(keys, rotation), values))
        if cache is not None:
            told = {"cache_kwargs": {"cache_position": places}} if _CACHE_IS_TOLD_PLACES else {}
            k, v = cache.update(k, v, self.layer_idx, **told)
        implementation = self.config._attn_implementation
        if depth is None:
            attend = ALL_ATTENTION_FUNCTIONS.get(implementation, eager_attention)
            out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)
        elif implementation in ("eager", "sdpa"):
            out = depth_attention(q, k, v, mask, depth, self.scaling)
        else:
            raise ValueError(
                f"attention over depth has its own joint softmax: attn_implementation={implementation!r} cannot run "
                "it; choose 'sdpa' or 'eager'"
            )
        return self.o_proj(out.reshape(*x_BSD.shape[:-1], -1)), {"keys": keys, "values": values}
