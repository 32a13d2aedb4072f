"""A Hugging Face folder as the source of an import: a Llama, or one of our own exports."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthbench.config.build import build
from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.residual import Residual, architecture

from .library import installed_transformers
from .llama import llama_settings
from .names import Exported, listed, named_tensors, tensor_faults
from .weight_files import WeightFiles, read_json

CONFIG = "config.json"
OWN = "depthbench"  # the model type of our own exports
_BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$")  # old versions of transformers stored what they compute


class HuggingFaceFolder:
    """A `Source`. Files are opened, and tensors read, one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError for a model that is not ours, files that are missing, or tensors that do not fit the
        configuration: missing ones, unexpected ones, wrong shapes."""
        self.folder = folder
        config = read_json(folder / CONFIG)
        self.remote_code = config.get("model_type") == OWN
        self.float32_norms = not self.remote_code  # as transformers' own Llama has them
        self.model, self.architecture, self.residual = settings_in(config, folder)
        self._stored = WeightFiles(folder)
        described = architecture(self.architecture)(self.residual, self.model.residual_shape)
        # in float64, so that a type other than it is one that the architecture keeps
        wanted = named_tensors(self.model, described, torch.float64, llama=not self.remote_code)
        _check(folder, wanted, self._stored.shapes, self.model.tie_embeddings)
        self._names = {tensor.logical: tensor.name for tensor in wanted}
        self.dtypes: Mapping[str, torch.dtype] = {n: self._stored.dtypes[name] for n, name in self._names.items()}
        self.tokenizer = next(
            (folder / n for n in ("tokenizer.json", "tokenizer.model") if (folder / n).is_file()), None
        )
        self.origin: dict[str, Any] = {
            "format": "Hugging Face",
            "path": str(folder.resolve()),
            "model_type": config.get("model_type"),
            "architectures": config.get("architectures"),
            "transformers": config.get("transformers_version"),
            "files": {file.name: file.stat().st_size for file in self._stored.files},
        }

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._names[name])

    @torch.no_grad()
    def logits(self, tokens_BS: Tensor, stored: Mapping[str, torch.dtype], dtype: torch.dtype) -> Tensor:
        """[B, S, V]: see `verify_import.Runs`. The folder's own code is not run."""
        model = self._load(dtype)
        names = {name: logical for logical, name in self._names.items()}
        for name, parameter in model.named_parameters():
            parameter.copy_(parameter.to(stored.get(names[name], dtype)))
        logits: Tensor = model(tokens_BS, use_cache=False).logits
        return logits

    def _load(self, dtype: torch.dtype) -> Any:
        transformers = installed_transformers()
        if not self.remote_code:
            loader = transformers.AutoModelForCausalLM
        else:
            from .hf.modeling_depthbench import DepthBenchForCausalLM as loader
        return loader.from_pretrained(self.folder, dtype=dtype, local_files_only=True).eval()


def settings_in(config: dict[str, Any], folder: Path) -> tuple[ModelConfig, str, Any]:
    """Backbone, architecture and its settings in `folder`'s config.json. Raises UserError for a model not ours."""
    return (_own if config.get("model_type") == OWN else _llama)(config, folder)


def plain_llama() -> type[Residual]:
    """The architecture that transformers' Llama is."""
    return next(found for found in Residual.registry.values() if found.llama_names is not None)


def _llama(config: dict[str, Any], folder: Path) -> tuple[ModelConfig, str, Any]:
    model, eps = llama_settings(config, str(folder / CONFIG))
    found = plain_llama()
    return model, found.name, found.Config(norm_eps=eps)


def _own(config: dict[str, Any], folder: Path) -> tuple[ModelConfig, str, Any]:
    """As `settings.model_config` wrote it, or transformers since."""
    names = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "sequence_length": "max_position_embeddings",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "rope_theta": "rope_theta",
        "rope_scaling": "position_scaling",
        "tie_embeddings": "tie_word_embeddings",
        "init_std": "initializer_range",
    }
    if missing := sorted({"residual_architecture", "residual", *names.values()} - config.keys()):
        raise UserError(f"{folder / CONFIG} is an export of depthbench without {', '.join(missing)}")
    name = config["residual_architecture"]
    try:
        config_class = architecture(name).Config
    except ValueError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from error
    model: ModelConfig = build(ModelConfig, {ours: config[theirs] for ours, theirs in names.items()}, "model")
    return model, name, build(config_class, config["residual"], "residual")


def _check(folder: Path, wanted: Iterable[Exported], found: dict[str, tuple[int, ...]], tied: bool) -> None:
    needed = {tensor.name: tensor.shape for tensor in wanted}
    # transformers ties them, whatever is stored
    besides = {name for name in found if _BUFFERS.search(name)} | (
        {"lm_head.weight"} - needed.keys() if tied else set()
    )
    held = {name: shape for name, shape in found.items() if name not in besides}
    if faults := tensor_faults(held, needed, f"{CONFIG} makes"):
        raise UserError(f"{folder}: weights and {CONFIG} do not fit: {listed(faults)}")
