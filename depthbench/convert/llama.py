"""A Hugging Face Llama's config.json as depthbench's settings, and what in one is not our backbone.

transformers writes RoPE's settings as `rope_theta` and `rope_scaling` (4) or as `rope_parameters` (5). A key that is
missing has the value that the model's class in transformers gives it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.model.rope_scaling import RopeScaling

Config = Mapping[str, Any]


class _Family(NamedTuple):
    """What is missing: `max_position_embeddings`, `num_key_value_heads`, `sliding_window`."""

    context: int
    kv_heads: int | None
    window: int | None


FAMILIES = {"llama": _Family(2048, None, None), "mistral": _Family(131072, 8, 4096)}
SUPPORTED = (
    "LlamaForCausalLM, MistralForCausalLM without a sliding window, and depthbench's own exports: decoders without "
    "biases, with SwiGLU (hidden_act silu), RoPE over whole heads (default, linear, yarn, llama3), RMS norms before "
    "each branch, grouped or multi-head attention"
)
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# of models that are a Llama with something more, which their class may ignore or not
_FOREIGN = ("num_local_experts", "num_experts", "attn_logit_softcapping", "final_logit_softcapping", "use_qk_norm")
_ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"},
}


def llama_settings(config: Config, where: str) -> tuple[ModelConfig, float]:
    """The backbone of a Llama-family config.json, and its norms' eps.

    Raises UserError that names everything in it that depthbench's backbone does not compute.
    """
    if "model_type" not in config and "architectures" not in config:
        raise UserError(f"{where} has neither model_type nor architectures: it describes no Hugging Face model")
    missing = [name for name in _REQUIRED if not isinstance(config.get(name), int)]
    faults = [*_foreign(config), *(f"no {name}" for name in missing)]
    if faults:
        raise UserError(f"{where} is no model that depthbench has: {'; '.join(faults)}. Supported are {SUPPORTED}")
    family = FAMILIES[config["model_type"]]
    length = _or(config, "max_position_embeddings", family.context)
    heads = config["num_attention_heads"]
    theta, scaling = _rope(config, length, where)
    model = ModelConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        vocab_size=config["vocab_size"],
        sequence_length=length,
        num_kv_heads=_or(config, "num_key_value_heads", family.kv_heads),
        head_dim=config.get("head_dim"),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=_or(config, "tie_word_embeddings", False),
        init_std=_or(config, "initializer_range", 0.02),
    )
    return model, float(_or(config, "rms_norm_eps", 1e-6))


def _or(config: Config, name: str, default: Any) -> Any:
    value = config.get(name)
    return default if value is None else value


def _foreign(config: Config) -> Iterator[str]:
    kind = config.get("model_type")
    classes = config.get("architectures") or []
    if kind not in FAMILIES:
        yield f"model_type is {kind!r}"
        return
    for name in classes:
        if name.lower() != f"{kind}forcausallm":
            yield f"its class is {name}"
    if (act := _or(config, "hidden_act", "silu")) not in ("silu", "swish"):
        yield f"hidden_act is {act!r}"
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(name):
            yield f"{name} is {config[name] if name != 'quantization_config' else 'set: its weights are quantised'}"
    family = FAMILIES[kind]
    window = config.get("sliding_window", family.window)
    if window is not None and window < (context := _or(config, "max_position_embeddings", family.context)):
        yield f"sliding_window is {window}, shorter than its context of {context}"
    for name in _FOREIGN:
        if config.get(name):
            yield f"{name} is {config[name]}"


def _rope(config: Config, length: int, where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling."""
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(given.pop("rope_theta", None) or _or(config, "rope_theta", 10000.0))
    kind: Any = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    given = {name: value for name, value in given.items() if value is not None}
    if kind not in _ROPE_KEYS or partial != 1.0 or (unknown := sorted(given.keys() - _ROPE_KEYS[kind])):
        what = f"rope_type is {kind!r}" if kind not in _ROPE_KEYS else f"partial_rotary_factor is {partial}"
        if kind in _ROPE_KEYS and partial == 1.0:
            what = f"RoPE of type {kind} has {', '.join(unknown)}"
        raise UserError(f"{where} is no model that depthbench has: {what}. Supported are {SUPPORTED}")
    if kind == "default":
        return theta, None
    factor = float(given.get("factor") or 1.0)
    settings: dict[str, Any] = {}
    if kind != "linear":
        original = config.get("original_max_position_embeddings") or length
        settings["original_sequence_length"] = given.get("original_max_position_embeddings", original)
    for name in ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
        if name in given:
            settings[name] = float(given[name])
    if kind == "yarn":
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        temperature = given.get("attention_factor", usual)
        if not math.isclose(temperature, usual, rel_tol=1e-6) or not given.get("truncate", True):
            raise UserError(
                f"{where} is no model that depthbench has: yarn with attention_factor={temperature} (ours is "
                f"0.1 ln(factor) + 1 = {usual:.4f}) and truncate={given.get('truncate', True)} (ours is true)"
            )
    return theta, RopeScaling(kind, factor, **settings)
