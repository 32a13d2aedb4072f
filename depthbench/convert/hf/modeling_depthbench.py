"""depthbench's models in transformers: a Llama-like backbone composed with the residual modules that trained it.

Needs torch and transformers alone (4.57 or 5). Decoding keeps keys and values, as any decoder does, and nothing of the
depth state, every operation of which is token-wise.

Shapes: B batch, S tokens of this call, D hidden, N residual streams, V vocabulary.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from depthbench.residual.state import Placement

from .attention_depthbench import rotation
from .configuration_depthbench import DepthBenchConfig
from .layers_depthbench import DepthBenchDecoderLayer, residual_of, undeclared

# transformers called it `past_key_values` until 5.24
CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"


class DepthBenchPreTrainedModel(PreTrainedModel):
    config: DepthBenchConfig
    config_class = DepthBenchConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DepthBenchDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    @property
    def _supports_flash_attn(self) -> bool:  # type: ignore[override]
        """Not where attention over depth has its own joint softmax: asked before a model is built."""
        residual = residual_of(self.config)
        before_last_block = residual.state_at(2 * (self.config.num_hidden_layers - 1))
        return all(tensor.placement is not Placement.KV_HEADS for tensor in before_last_block.history)

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
        with undeclared():
            self.layers = nn.ModuleList(
                DepthBenchDecoderLayer(config, self.residual, number) for number in range(config.num_hidden_layers)
            )
            self.readout = self.residual.readout(torch.get_default_dtype())
        self.gradient_checkpointing = False
        self.share_reads(across_layers=True)
        self._mark_places()
        self.post_init()
        # after `post_init`, which in transformers 4 refuses the name `bias`
        self._keep_in_fp32_modules_strict = self._kept_in_float32()

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

    def _mark_places(self) -> None:
        """Tell each module with residual parameters where another of its kind can be had, for `_init_weights`."""
        for sublayer, reader in ((k, m) for region in self._readers() for k, m in region.items()):
            for path, module in reader.named_modules():
                module.residual_place = (sublayer, path)

    def _kept_in_float32(self) -> set[str] | None:
        """Names of parameters that training keeps in float32 where the rest is in half precision."""
        readers = (reader for region in self._readers() for reader in region.values())
        named = (pair for reader in readers for pair in reader.named_parameters())
        kept = {path.rpartition(".")[2] for path, parameter in named if parameter.dtype != torch.get_default_dtype()}
        return kept or None

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
            position_ids = _positions(places, attention_mask)
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
            state = layer(state, by, mask, places, cache=cache, **kwargs)
            if wants_states:
                states.append(self.residual.probe(state))
        hidden = self.readout(state)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=(*states[:-1], hidden) if wants_states else None,
            **cast(Any, {CACHE: cache if use_cache else None}),
        )


def _positions(places_S: Tensor, attention_mask: Tensor | None) -> Tensor:
    """[B or 1, S]: places counted from each sequence's first token. Padding on the left must not shift them: keys of
    earlier depth are not rotated, so attention over depth depends on the position itself."""
    if attention_mask is None or attention_mask.ndim != 2:
        return places_S.unsqueeze(0)
    return (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)[:, -len(places_S) :]


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
        self._keep_in_fp32_modules_strict = self.model._keep_in_fp32_modules_strict

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
