"""Decoder layers of depthbench's Hugging Face models: attention and MLP, tied to the depth state by the residual
modules that trained them.

Shapes: B batch, S tokens, D hidden.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from depthbench.residual.parameters import residual_parameter
from depthbench.residual.protocol import Residual, Shape
from depthbench.residual.state import DepthState

from .attention_depthbench import DepthBenchAttention, Rotation
from .configuration_depthbench import DepthBenchConfig


def residual_of(config: DepthBenchConfig) -> Residual:
    """The architecture at the model's shape."""
    architecture = Residual.registry[config.residual_architecture]
    shape = Shape(
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    return architecture(architecture.Config(**config.residual), shape)


@contextlib.contextmanager
def undeclared() -> Iterator[None]:
    """Parameters made meanwhile do not carry their declarations, which serve training: they hold functions, which
    cannot be pickled, and transformers 4 makes parameters anew from all their attributes, which fails."""
    # of the module that makes them, which as `from . import` transformers would not find
    names = residual_parameter.__globals__
    declare = names["declare"]
    names["declare"] = lambda parameter, spec: parameter
    try:
        yield
    finally:
        names["declare"] = declare


class DepthBenchMLP(nn.Module):
    """down(silu(gate x) * up x), and the projections of x that the architecture asks for."""

    def __init__(self, config: DepthBenchConfig, residual: Residual, layer_idx: int) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        extra = residual.extra_projections(layer_idx)
        self.extra = nn.ModuleDict({name: nn.Linear(width, rows, bias=False) for name, rows in extra})

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y, {name: projection(x) for name, projection in self.extra.items()}


class DepthBenchDecoderLayer(GradientCheckpointingLayer):
    """One attention and one MLP sublayer, each tied to the depth state by its connection."""

    def __init__(self, config: DepthBenchConfig, residual: Residual, layer_idx: int) -> None:
        super().__init__()
        dtype = torch.get_default_dtype()  # that of the model: transformers sets it while it builds one
        self.self_attn = DepthBenchAttention(config, layer_idx)
        self.attention_residual = residual.connection(2 * layer_idx, dtype)
        self.mlp = DepthBenchMLP(config, residual, layer_idx)
        self.mlp_residual = residual.connection(2 * layer_idx + 1, dtype)

    def forward(
        self,
        state: DepthState,
        rotation: Rotation,
        mask: Tensor | None,
        places: Tensor,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> DepthState:
        read = self.attention_residual(state)
        y, taps = self.self_attn(read.hidden, rotation, mask, read.depth_kv, cache, places, **kwargs)
        state = self.attention_residual.write(state, read, y, taps)
        read = self.mlp_residual(state)
        y, taps = self.mlp(read.hidden)
        return self.mlp_residual.write(state, read, y, taps)
