"""config.json and generation_config.json of an export."""

from dataclasses import asdict
from typing import Any

import torch

from depthbench.config.load import plain
from depthbench.config.schema import RunConfig
from depthbench.model.config import ModelConfig
from depthbench.residual import Residual

from .code import CONFIGURATION, MODELING
from .names import is_llama


def model_config(run: RunConfig, residual: Residual, dtype: torch.dtype, eos: int | None) -> dict[str, Any]:
    """Plain data of config.json. eos: id of the end-of-document token, where a tokenizer says it."""
    model = run.model
    shape = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "max_position_embeddings": model.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": None,  # the row of a padding token would get no gradient
        "use_cache": True,
    }
    if is_llama(run, residual):
        llama = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}
        eps = residual.config.norm_eps
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **shape,
            **llama,
            "rms_norm_eps": eps,
            **_llama_rope(model),
        }
    settings = plain(run)["residual"]
    architecture = settings.pop("architecture")
    return {
        "architectures": ["DepthBenchForCausalLM"],
        "model_type": "depthbench",
        "auto_map": {
            "AutoConfig": f"{CONFIGURATION}.DepthBenchConfig",
            "AutoModel": f"{MODELING}.DepthBenchModel",
            "AutoModelForCausalLM": f"{MODELING}.DepthBenchForCausalLM",
        },
        "residual_architecture": architecture,
        "residual": settings,
        **shape,
        "rope_theta": model.rope_theta,
        "position_scaling": asdict(model.rope_scaling) if model.rope_scaling else None,
    }


def _llama_rope(model: ModelConfig) -> dict[str, Any]:
    """In the form of transformers 4, which 5 reads too."""
    scaling, theta = model.rope_scaling, model.rope_theta
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    if scaling.kind == "ntk":  # its static form is nothing but another theta
        size = model.head_size
        return {"rope_theta": theta * scaling.factor ** (size / (size - 2)), "rope_scaling": None}
    settings: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "yarn":
        settings |= {
            "original_max_position_embeddings": scaling.original_sequence_length,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
        }
    if scaling.kind == "llama3":
        settings |= {
            "original_max_position_embeddings": scaling.original_sequence_length,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    return {"rope_theta": theta, "rope_scaling": settings}


def generation_config(eos: int | None) -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": eos}
