"""Causal self-attention, multi-head or grouped-query, from Megatron-Core's parallel linears and torch's SDPA.

Shapes: S sequence, B microbatch, D hidden, H heads of this rank, G KV heads of this rank, K head dim.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from depthbench.parallel.context import ParallelContext
from depthbench.residual import Residual
from depthbench.residual.parameters import Part, truncated_normal
from depthbench.residual.protocol import DepthKV

from .cached_attention import Past, cached_attention
from .config import ModelConfig
from .depth_sdpa import joint_attention
from .linear import column_linear, row_linear
from .rope import Rope


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, residual: Residual, rope: Rope, context: ParallelContext) -> None:
        super().__init__()
        self.rope = rope
        self.head_size = size = config.head_size
        self.heads = config.num_attention_heads // context.tp_size
        self.kv_heads = config.kv_heads // context.tp_size
        rows = {"q": config.num_attention_heads * size, "k": config.kv_heads * size, "v": config.kv_heads * size}

        def part(name: str, shape: tuple[int, int]) -> Part:
            return Part(name, shape, truncated_normal(config.init_std * residual.init_scale(name)))

        width = config.hidden_size
        self.qkv = column_linear([part(name, (count, width)) for name, count in rows.items()], context)
        self.out = row_linear(part("out", (width, rows["q"])), context)

    def forward(
        self, x_SBD: Tensor, depth: DepthKV | None, past: Past | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x is sequence-sharded under sequence parallelism; the inner tensors hold all tokens and this rank's heads.

        past: in inference, what came before x's tokens and where theirs are kept (no gradient goes through it).
        Returns the branch output and the taps `keys` and `values` [S, B, G, K], before RoPE.
        """
        qkv, _ = self.qkv(x_SBD)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_size))
            for part in qkv.split([n * self.head_size for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        )
        v = v.contiguous()  # a view would keep all of qkv until backward
        start = past.start if past else 0
        rotated = (self.rope.rotate(q, start), self.rope.rotate(k, start), v)
        q_BHSK, k_BGSK, v_BGSK = (t.permute(1, 2, 0, 3) for t in rotated)
        slots = DepthKV(*(tuple(t.permute(1, 2, 0, 3) for t in ts) for ts in depth)) if depth else None
        if past:
            out = cached_attention(q_BHSK, k_BGSK, v_BGSK, past.pages(), slots)
            past.keep(k_BGSK, v_BGSK)
        elif slots is None:
            grouped = self.heads != self.kv_heads
            out = F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=grouped)
        else:
            out = joint_attention(q_BHSK, k_BGSK, v_BGSK, *slots)
        y, _ = self.out(out.permute(2, 0, 1, 3).flatten(2))
        return y, {"keys": k, "values": v}
