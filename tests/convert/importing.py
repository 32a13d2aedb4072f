"""Llamas as transformers writes them, and the import command in a process of its own."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from depthbench import cli
from tests.corpora import VOCAB
from tests.harness import run_workers

from .checkpoints import Said

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB + 3,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
ROPE: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {**YARN, "rope_theta": 10000.0},
    "llama3": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 16},
}


@torch.no_grad()
def llama(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **settings: Any) -> Path:
    """A random Llama (a Mistral where there is a `sliding_window`) in `folder`, weights far from initial ones."""
    kind = (MistralConfig, MistralForCausalLM) if "sliding_window" in settings else (LlamaConfig, LlamaForCausalLM)
    torch.manual_seed(0)
    model = kind[1](kind[0](**{**SHAPE, **settings}))
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def as_transformers_4(folder: Path) -> Path:
    """Its config.json with RoPE's settings where transformers 4 has them."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change(folder: Path, **settings: Any) -> None:
    """Overwrite keys of its config.json; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **settings}
    removed = {key for key, value in settings.items() if value is None}
    file.write_text(json.dumps({key: value for key, value in config.items() if key not in removed}))


@torch.no_grad()
def transformers_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits: Tensor = model(tokens_BS, use_cache=False).logits
    return logits


def _command(rank: int, world_size: int, store: str, words: list[str], before: Callable[[], None] | None) -> Said:
    if before:
        before()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["convert", "import", *words])
    return Said(code, out.getvalue(), err.getvalue())


def import_(source: Path, out: Path, *options: str, before: Callable[[], None] | None = None) -> Said:
    """`depthbench convert import`; `before` may tamper with its process."""
    (said,) = run_workers(1, _command, [str(source), str(out), *options], before)
    return said
