"""Checkpoints as DepthBench's code (a fork of OLMo-core) writes them, made of a naive reference's random weights.

Names, shapes and settings are written out here from the fact sheet; the product is only run by its command.
"""

import contextlib
import copy
import io
import json
import pickle
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from depthbench import cli
from tests.reference import Shape, random_weights

SHAPE = Shape(3, 32, 48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=61, rope_theta=10000.0)
CORE = "olmo_core.nn"
NORM_CLASS = f"{CORE}.layer_norm.LayerNormConfig"
CONNECTIONS: dict[str, Any] = {"gating_factor_init": 0.01, "sinkhorn_tau": 1.0, "disable_static_weight_decay": True}
CONNECTIONS |= {"scale_output_init_by_sqrt_n": True, "liger_phi_dtype": "bfloat16", "liger_allow_fp32": False}
CONNECTIONS |= {"liger_rms_eps": 1e-6, "liger_pre_eps": 0.0, "liger_sinkhorn_eps": 1e-6, "liger_post_mult": 2.0}
CONNECTIONS |= {"sinkhorn_iters": 20, "num_residual_streams": 4, "collapse": "auto"}
CONNECTIONS |= {"_CLASS_": f"{CORE}.transformer.config.HyperConnectionsConfig"}
MODA: dict[str, Any] = {"backend": "v17", "cache_post_norm_k": True, "depth_bs": 64, "depth_warps": 4}
MODA |= {"extra_ffn_kv_proj": True, "extra_attn_kv_proj": False, "_CLASS_": f"{CORE}.transformer.config.MoDAConfig"}


class Published(NamedTuple):
    """One of the ten: our name and settings, the reference's options, and `model.block` there."""

    architecture: str
    residual: dict[str, Any]
    options: dict[str, Any]
    block: dict[str, Any]


PUBLISHED = {
    "pre_ln": Published("pre_ln", {}, {}, {"name": "default"}),
    "sandwich_ln": Published("sandwich_ln", {}, {}, {"name": "peri_norm"}),
    "lns": Published("lns", {}, {}, {"name": "default_scaled"}),
    "deepnorm": Published("deepnorm", {}, {}, {"name": "deepnorm"}),
    "keel": Published("keel", {}, {}, {"name": "keel"}),
    "full_attnres": Published(
        "block_attnres",
        {"sublayers_per_block": 1},
        {"sublayers_per_block": 1},
        {"name": "attnres", "attnres_block_size": 1},
    ),
    "block_attnres": Published(
        "block_attnres",
        {"sublayers_per_block": 4},
        {"sublayers_per_block": 4},
        {"name": "attnres", "attnres_block_size": 4},
    ),
    "hc": Published("hc", {}, {}, {"name": "hc", "hyper_connections": {**CONNECTIONS, "kind": "hc"}}),
    "mhc": Published(
        "mhc",
        {},
        {},
        {"name": "mhc", "hyper_connections": {**CONNECTIONS, "kind": "liger_mhc", "tanh": False}},
    ),
    "moda": Published("moda", {}, {}, {"name": "moda", "moda": MODA, "moda_skip_ffn_kv": False}),
    "moda_post": Published(
        "moda", {"norm": "post"}, {"norm": "post"}, {"name": "post_norm_moda", "moda": MODA, "moda_skip_ffn_kv": False}
    ),
}

LINEAR = {"q": "w_q", "k": "w_k", "v": "w_v", "out": "w_out", "gate": "w1", "down": "w2", "up": "w3"}
RESIDUAL = {
    "attention": {
        "norm.weight": "attention_norm.weight",
        "post_norm.weight": "post_attention_norm.weight",
        "query": "attn_res_proj.weight",
        "key_norm.weight": "attn_res_norm.weight",
    },
    "mlp": {
        "norm.weight": "feed_forward_norm.weight",
        "post_norm.weight": "post_feed_forward_norm.weight",
        "query": "mlp_res_proj.weight",
        "key_norm.weight": "mlp_res_norm.weight",
    },
}
CONNECTOR = {
    **{"static_alpha": "static_alpha", "static_beta": "static_beta", "dynamic_alpha": "dynamic_alpha_proj"},
    **{"dynamic_alpha_scale": "dynamic_alpha_scale", "dynamic_beta": "dynamic_beta_proj"},
    **{"dynamic_beta_scale": "dynamic_beta_scale", "phi": "phi", "bias": "b"},
    **{"scale_pre": "alpha_pre", "scale_post": "alpha_post", "scale_res": "alpha_res"},
}
TOP = {
    "embedding.weight": "embeddings.weight",
    "readout.norm.weight": "lm_head.norm.weight",
    "head.weight": "lm_head.w_out.weight",
    "readout.query": "res_proj.weight",
    "readout.key_norm.weight": "res_norm.weight",
}


def their_name(name: str, architecture: str) -> str:
    """DepthBench's name of one of the reference's weights."""
    if name in TOP:
        return TOP[name]
    _, number, branch, rest = name.split(".", 3)
    block = f"blocks.{number}."
    sublayer = branch.removesuffix("_residual")
    module = {"attention": "attention", "mlp": "feed_forward"}[sublayer]
    if not branch.endswith("_residual"):
        inner = f"{module}.{module}" if architecture == "moda" else module
        return f"{block}{inner}.{LINEAR[rest.removesuffix('.weight')]}.weight"
    if rest in CONNECTOR:
        return f"{block}{module}_hyper_connection.{CONNECTOR[rest]}"
    return block + RESIDUAL[sublayer][rest]


def their_tensors(weights: dict[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """The whole model under DepthBench's names."""
    found = {}
    for name, weight in weights.items():
        if name.endswith("depth_k.weight"):
            values = weights[name.replace("depth_k", "depth_v")]
            found[f"blocks.{name.split('.')[1]}.feed_forward.kv_proj.weight"] = torch.cat([weight, values])
        elif not name.endswith("depth_v.weight"):
            theirs = their_name(name, architecture)
            found[theirs] = weight[None] if theirs.endswith("res_proj.weight") else weight
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def with_aliases(tensors: dict[str, Tensor], drop: bool = False) -> dict[str, Tensor]:
    """As the connectors hold their branches too. drop: under the aliases alone."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        block, _, rest = name.partition(".attention")
        for module in ("attention", "feed_forward"):
            for inner, outer in (("norm", f"{module}_norm"), (module, module)):
                block, dot, rest = name.partition(f".{outer}.")
                if dot:
                    found[f"{block}.{module}_hyper_connection.branch.{inner}.{rest}"] = tensor
                    if drop:
                        del found[name]
    return found


def their_config(published: Published, shape: Shape = SHAPE, dtype: str = "bfloat16") -> dict[str, Any]:
    """The settings of an experiment, as far as they speak of the model."""
    layer_norm = {"name": "rms", "eps": 1e-6, "bias": False, "dtype": dtype, "_CLASS_": NORM_CLASS}
    rope = {"name": "default", "theta": shape.rope_theta, "full_precision": True, "no_global_rope": False}
    block: dict[str, Any] = {
        "sequence_mixer": {
            **{"name": "default", "n_heads": shape.num_heads, "n_kv_heads": shape.num_kv_heads},
            **{"head_dim": shape.head_dim, "bias": False, "backend": "flash_2", "dtype": dtype, "type": "attention"},
            "rope": {**rope, "_CLASS_": f"{CORE}.rope.RoPEConfig"},
            "_CLASS_": f"{CORE}.attention.AttentionConfig",
        },
        "layer_norm": {**layer_norm, "name": "default" if published.block["name"] == "deepnorm" else "rms"},
        "feed_forward": {
            **{"hidden_size": shape.ffn_hidden_size, "name": "default", "bias": False, "dtype": dtype},
            **{"activation": "silu", "_CLASS_": f"{CORE}.feed_forward.FeedForwardConfig"},
        },
        "_CLASS_": f"{CORE}.transformer.config.TransformerBlockConfig",
        **copy.deepcopy(published.block),
    }
    model: dict[str, Any] = {
        **{"d_model": shape.hidden_size, "vocab_size": shape.vocab_size, "n_layers": shape.num_layers},
        "block": block,
        "lm_head": {
            **{"name": "default", "layer_norm": layer_norm, "bias": False, "dtype": dtype},
            **{"loss_implementation": "default", "_CLASS_": f"{CORE}.lm_head.LMHeadConfig"},
        },
        **{"name": "default", "dtype": dtype, "init_seed": 0, "init_std": 0.02},
        "init_method": "deepnorm" if published.block["name"] == "deepnorm" else "normal",
        "_CLASS_": f"{CORE}.transformer.config.TransformerConfig",
    }
    if "moda" in published.block:
        last = {**copy.deepcopy(block), "moda_skip_ffn_kv": True}
        model["block_overrides"] = {str(shape.num_layers - 1): last}
    tokenizer = {"vocab_size": shape.vocab_size, "eos_token_id": 60, "pad_token_id": 1, "identifier": "/gone.json"}
    dataset = {"sequence_length": 16, "tokenizer": tokenizer, "_CLASS_": "olmo_core.data.NumpyFSLDatasetConfig"}
    return {"model": model, "dataset": dataset, "data_loader": {}, "train_module": {}, "trainer": {}}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """One step's folder, with an optimizer's state beside the model's."""
    places = folder / "model_and_optim"
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in tensors.items()}
    state |= {f"optim.state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in list(tensors.items())[:2]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        save(state, storage_writer=FileSystemWriter(places), no_dist=True)
    (places / ".metadata").write_bytes(_pickled_by_olmo(pickle.loads((places / ".metadata").read_bytes())))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / ".metadata.json").write_text(json.dumps({"version": "2.5.0"}))
    return folder


def _pickled_by_olmo(metadata: Any) -> bytes:
    """OLMo-core's writer records places in a class of its own module, which is not there when they are read."""

    @dataclass
    class _StorageInfo:
        relative_path: str
        offset: int
        length: int

    module = types.ModuleType("olmo_core.distributed.checkpoint.filesystem")
    _StorageInfo.__module__, _StorageInfo.__qualname__ = module.__name__, "_StorageInfo"
    module._StorageInfo = _StorageInfo  # type: ignore[attr-defined]
    metadata.storage_data = {
        index: _StorageInfo(place.relative_path, place.offset, place.length)
        for index, place in metadata.storage_data.items()
    }
    names = _parents(module.__name__)
    sys.modules.update({name: module if name == module.__name__ else types.ModuleType(name) for name in names})
    try:
        return pickle.dumps(metadata)
    finally:
        for name in names:
            del sys.modules[name]


def _parents(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[: n + 1]) for n in range(len(words))]


def drawn(published: Published, seed: int = 3) -> dict[str, Tensor]:
    """The reference's weights, float64."""
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights(SHAPE, published.architecture, generator, **published.options)
    return {name: weight.detach() for name, weight in weights.items()}


class Convert(NamedTuple):
    """What `depthbench convert` returned and printed."""

    code: int
    out: str
    err: str


def convert(*words: Any) -> Convert:
    """Run it in this process, which must be a worker's: it starts process groups."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["convert", *map(str, words)])
    return Convert(code, out.getvalue(), err.getvalue())
