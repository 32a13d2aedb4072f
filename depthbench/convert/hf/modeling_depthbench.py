"""depthbench's models in transformers: a Llama-like backbone composed with the residual modules that trained it.

Needs torch and transformers alone (4.57 or 5). Decoding keeps keys and values, as any decoder does, and nothing of the
depth state, every operation of which is token-wise.

Shapes: B batch, S tokens of this call, T tokens with the cached ones, D hidden, H heads, G KV heads, K head dim.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple

from depthbench.model.depth_sdpa import joint_attention
from depthbench.model.rope_scaling import RopeScaling, inverse_frequencies
from depthbench.residual import Residual, Shape
from depthbench.residual.protocol import DepthKV
from depthbench.residual.state import DepthState

from .configuration_depthbench import DepthBenchConfig

# transformers called it `past_key_values` until 5.24
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"
Rotation = tuple[Tensor, Tensor]


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
    """[B, G, R, S, T] of q [B, G, R, S, K] and k [B, G, T, K]; without a mask each query sees what precedes it."""
    scores = (q @ k.unsqueeze(2).mT) * scale
    if mask is None:
        new, seen = scores.shape[-2:]
        mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril_(seen - new)
    else:
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
    if mask is None and q.shape[-2] == k.shape[-2]:
        return joint_attention(q, k, v, slots_k, slots_v).transpose(1, 2)
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
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The branch's output and its taps: keys before RoPE and values, [B, S, G, K]."""
        q, keys, values = (
            projection(x_BSD).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, rotation), rotate(keys, rotation), values))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
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
        self, state: DepthState, rotation: Rotation, mask: Tensor | None, cache: Cache | None = None, **kwargs: Any
    ) -> DepthState:
        read = self.attention_residual(state)
        y, taps = self.self_attn(read.hidden, rotation, mask, read.depth_kv, cache, **kwargs)
        state = self.attention_residual.write(state, read, y, taps)
        read = self.mlp_residual(state)
        y, taps = self.mlp(read.hidden)
        return self.mlp_residual.write(state, read, y, taps)


class DepthBenchPreTrainedModel(PreTrainedModel):
    config: DepthBenchConfig
    config_class = DepthBenchConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DepthBenchDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        place = getattr(module, "residual_place", None)
        if place is None:
            super()._init_weights(module)
            return
        residual, dtype = residual_of(self.config), torch.get_default_dtype()
        sublayer, path = place
        last = sublayer == residual.shape.num_sublayers
        twin = (residual.readout(dtype) if last else residual.connection(sublayer, dtype)).get_submodule(path)
        for name, declared in twin.named_parameters(recurse=False):
            parameter = module.get_parameter(name)
            if not getattr(parameter, "_is_hf_initialized", False):
                (part,) = cast(Any, declared).spec.parts
                with torch.no_grad():
                    parameter.copy_(part.init(tuple(parameter.shape), torch.Generator().manual_seed(sublayer)))

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As transformers', non-reentrant always: a depth state is a structure of tensors."""
        options = {**(gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        super().gradient_checkpointing_enable(gradient_checkpointing_kwargs=options, **kwargs)
        cast(DepthBenchModel, self.base_model).share_reads(across_layers=False)

    def gradient_checkpointing_disable(self) -> None:
        super().gradient_checkpointing_disable()
        cast(DepthBenchModel, self.base_model).share_reads(across_layers=True)


class DepthBenchModel(DepthBenchPreTrainedModel):
    """Tokens to the normalised input of the head."""

    def __init__(self, config: DepthBenchConfig) -> None:
        super().__init__(config)
        self.residual = residual_of(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DepthBenchDecoderLayer(config, self.residual, number) for number in range(config.num_hidden_layers)
        )
        self.readout = self.residual.readout(torch.get_default_dtype())
        self.gradient_checkpointing = False
        self.share_reads(across_layers=True)
        self._note_residual_parameters()
        self.post_init()

    def _readers(self) -> list[dict[int, nn.Module]]:
        """The depth state's readers by sublayer, layer by layer, the readout last."""
        regions: list[dict[int, nn.Module]] = []
        for number, layer in enumerate(cast(Iterable[DepthBenchDecoderLayer], self.layers)):
            regions.append({2 * number: layer.attention_residual, 2 * number + 1: layer.mlp_residual})
        regions.append({2 * len(self.layers): self.readout})
        return regions

    def share_reads(self, across_layers: bool) -> None:
        """Let reads of depth share their passes over the sources; with checkpoints between layers, within each."""
        regions = self._readers()
        for readers in [{k: m for region in regions for k, m in region.items()}] if across_layers else regions:
            self.residual.share(readers)

    def _note_residual_parameters(self) -> None:
        """Mark each module with residual parameters with where another of its kind can be had, for `_init_weights`;
        and ask transformers to keep in float32 what training keeps there."""
        in_float32 = set()
        for sublayer, reader in ((k, m) for region in self._readers() for k, m in region.items()):
            for path, module in reader.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    module.residual_place = (sublayer, path)
                    del parameter.spec  # it holds functions, which cannot be pickled
                    if parameter.dtype != torch.get_default_dtype():
                        in_float32.add(name)
        self._keep_in_fp32_modules_strict = in_float32 or None

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """cache and past_key_values are two names of one argument.

        hidden_states, where asked for: the embedding, what each layer but the last leaves (the newest representation
        of its depth state; of residual streams all, [B, S, N, D]), and the readout.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of them")
        if inputs_embeds is None:
            inputs_embeds = cast(Tensor, self.embed_tokens(input_ids))
        cache = past_key_values if cache is None else cache
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache, cache = False, None
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        seen = int(cache.get_seq_length()) if cache is not None else 0
        places = torch.arange(seen, seen + inputs_embeds.shape[1], device=inputs_embeds.device)
        if position_ids is None:
            position_ids = places.unsqueeze(0)
        mask = causal_mask(
            {
                "config": self.config,
                "input_embeds": inputs_embeds,
                "inputs_embeds": inputs_embeds,
                "attention_mask": attention_mask,
                "cache_position": places,
                "past_key_values": cache,
                "cache": cache,
                "position_ids": position_ids,
            }
        )
        by = rotation(self.config, position_ids, inputs_embeds.dtype)
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = [inputs_embeds]
        state = self.residual.start(inputs_embeds)
        for layer in self.layers:
            state = layer(state, by, mask, cache=cache, **kwargs)
            if wants_states:
                states.append(self.residual.probe(state))
        hidden = self.readout(state)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=(*states[:-1], hidden) if wants_states else None,
            **cast(Any, {CACHE: cache if use_cache else None}),
        )


def causal_mask(offered: Mapping[str, Any]) -> Any:
    """transformers' mask, called by the names that its version knows."""
    wanted = inspect.signature(create_causal_mask).parameters
    return create_causal_mask(**{name: value for name, value in offered.items() if name in wanted})


class DepthBenchForCausalLM(DepthBenchPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: DepthBenchConfig) -> None:
        super().__init__(config)
        self.model = DepthBenchModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """logits [B, S, V], or of the last `logits_to_keep` tokens (an int above 0) or of those places (a tensor).

        labels: [B, S], not shifted, -100 where there is nothing to predict; gives the mean loss.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cache=cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: getattr(outputs, CACHE)}
        )
