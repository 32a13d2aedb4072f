"""Mixture-of-Depths Attention: attention also looks back through depth.

    pre-norm (default):  h <- h + F(norm(h))        post-norm:  h <- norm(h + F(h))

Attention of block i >= 1 runs one joint softmax over this layer's keys of earlier tokens
and, at the same token, over the keys that every earlier sublayer left behind:

    softmax(q_t [K_{s<=t} ; D_{slot<2i, t}] / sqrt(head_dim)) [V ; DV]

Attention of block i leaves its own keys (before RoPE) and values in slot 2i; its MLP leaves two extra projections of
its input in slot 2i + 1 (not in the last block, whose slots nobody reads). The readout is norm(h) in both forms.

Source: arXiv 2603.15619; DepthBench `moda`, `post_norm_moda`. State: live h [S, B, D], history `key.slot` and
`value.slot` [S, B, H_kv, K], which tensor-parallel ranks share by key/value head.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .hidden import HiddenResidual
from .norms import RMSNorm
from .olmo import OlmoFormat, OlmoSetting
from .protocol import Connection, Cost, DepthKV, ExtraProjection, Kept, Read, Shape, Upcycling
from .state import DepthState, Placement, StateSpec, TensorSpec


@dataclass(frozen=True)
class MoDAConfig:
    norm: Literal["pre", "post"] = "pre"  # of the branch's input, or of h and the branch
    norm_eps: float = 1e-6


class MoDAConnection(Connection):
    def __init__(self, sublayer: int, leaves_slot: bool, shape: Shape, cfg: MoDAConfig, dtype: torch.dtype):
        super().__init__()
        self.sublayer, self.leaves_slot, self.head_dim = sublayer, leaves_slot, shape.head_dim
        self.post_norm = cfg.norm == "post"
        self.norm = RMSNorm(shape.hidden_size, cfg.norm_eps, dtype)

    def read(self, state: DepthState) -> Read:
        hidden = state.live["h"] if self.post_norm else self.norm(state.live["h"])
        is_mlp = self.sublayer % 2 == 1
        if is_mlp or self.sublayer == 0:
            return Read(hidden)
        slots = range(self.sublayer)
        keys = tuple(state.history[f"key.{slot}"] for slot in slots)
        return Read(hidden, DepthKV(keys, tuple(state.history[f"value.{slot}"] for slot in slots)))

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        total = state.live["h"] + y
        live = {"h": self.norm(total) if self.post_norm else total}
        if not self.leaves_slot:
            return DepthState(live, {})  # the last block: its attention was the slots' last reader
        if self.sublayer % 2 == 1:
            key, value = (taps[name].unflatten(-1, (-1, self.head_dim)) for name in ("depth_k", "depth_v"))
        else:
            key, value = taps["keys"], taps["values"]
        # copies: views would keep the whole of the branch's first matmul until the last block has read them
        slot = {f"key.{self.sublayer}": key.contiguous(), f"value.{self.sublayer}": value.contiguous()}
        return DepthState(live, {**state.history, **slot})


class MoDA(HiddenResidual, name="moda"):
    Config = MoDAConfig
    config: MoDAConfig
    olmo = OlmoFormat(
        ("moda", "post_norm_moda"),
        names={
            "mlp.depth_k.weight": "feed_forward.kv_proj.weight",
            "mlp.depth_v.weight": "feed_forward.kv_proj.weight",
        },
        unused=frozenset({"feed_forward.kv_proj.weight"}),  # the last block's, where its config does not leave it out
        settings={"norm": OlmoSetting("name", "moda", {"moda": "pre", "post_norm_moda": "post"})},
        fixed={
            "moda._CLASS_": ("olmo_core.nn.transformer.config.MoDAConfig", None),
            "moda.extra_ffn_kv_proj": (True, None),
            "moda.extra_attn_kv_proj": (False, None),
            "moda.attention_scale": (None,),
        },
        free=frozenset(f"moda.{key}" for key in ("backend", "cache_post_norm_k", "depth_bs", "depth_warps")),
        last_block={"moda_skip_ffn_kv": True},
        attention="attention.attention",
        feed_forward="feed_forward.feed_forward",
    )

    def _leaves_slot(self, sublayer: int) -> bool:
        return sublayer // 2 < self.shape.num_layers - 1

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return MoDAConnection(sublayer, self._leaves_slot(sublayer), self.shape, self.config, dtype)

    def extra_projections(self, block: int) -> tuple[ExtraProjection, ...]:
        if not self._leaves_slot(2 * block + 1):
            return ()
        rows = self.shape.num_kv_heads * self.shape.head_dim
        return ExtraProjection("depth_k", rows), ExtraProjection("depth_v", rows)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        return Upcycling(
            replace(self.config, norm_eps=norm_eps),
            "attention shares one softmax with two slots of each earlier block; even slots of zeros take weight from "
            "the sequence",
        )

    def carried(self, sublayer: int, norm_D: Tensor) -> dict[str, Tensor]:
        """Post-norms lie elsewhere."""
        has_place = self.config.norm == "pre" or sublayer == self.shape.num_sublayers
        return {"norm.weight": norm_D} if has_place else {}

    def state_at(self, sublayer: int) -> StateSpec:
        """Slots are dropped once the last attention has read them."""
        last_reader = self.shape.num_sublayers - 2
        slots = range(sublayer if sublayer <= last_reader else 0)
        heads = (self.shape.num_kv_heads, self.shape.head_dim)
        history = (TensorSpec(f"{kind}.{s}", heads, Placement.KV_HEADS) for s in slots for kind in ("key", "value"))
        return StateSpec((TensorSpec("h", (self.shape.hidden_size,)),), tuple(history))

    def num_parameters(self) -> int:
        shape = self.shape
        projections = 2 * shape.num_kv_heads * shape.head_dim * shape.hidden_size
        return super().num_parameters() + (shape.num_layers - 1) * projections

    def kept(self, sublayer: int) -> Kept:
        """Keys and values of a slot, of attention's the keys alone, which are not rotated; of earlier slots nothing."""
        slot = sublayer < self.shape.num_sublayers and self._leaves_slot(sublayer)
        copies = (2 if sublayer % 2 == 1 else 1) if slot else 0
        return Kept(heads=copies * self.shape.num_kv_heads * self.shape.head_dim)

    def flops_per_token(self) -> Cost:
        """Extra projections 4 D G K a block but the last (G KV heads of size K); attention over 2i slots in block i,
        4 H K a slot. The paper gives no formula of its own."""
        shape = self.shape
        projections = 4 * (shape.num_layers - 1) * shape.hidden_size * shape.num_kv_heads * shape.head_dim
        attention = 4 * shape.num_heads * shape.head_dim * shape.num_layers * (shape.num_layers - 1)
        return Cost(projections + attention, projections + attention)
