"""An export as transformers builds it from its config.json, with its files' weights of one part in memory at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .export import Export
from .layerwise import Layerwise, parameters_on_meta
from .library import installed_transformers
from .names import tensor_faults
from .shards import INDEX


class WeightFiles:
    """The tensors in the safetensors files that transformers would load. shapes: of each, by name."""

    def __init__(self, folder: Path) -> None:
        self._places = _places(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(filter(Path.is_file, set(self._places.values()))):
            with safe_open(file, "pt") as held:
                self.shapes |= {name: tuple(held.get_slice(name).get_shape()) for name in held.keys()}  # noqa: SIM118

    def faults(self, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
        """How the files differ from `wanted`, or from their own index."""
        unlisted = (f"{name} is not in the index" for name in self.shapes if name not in self._places)
        return [*tensor_faults(self.shapes, wanted, "the model makes"), *unlisted]

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        with safe_open(self._places[name], "pt") as held:
            tensor: Tensor = held.get_tensor(name)
        return tensor


def _places(folder: Path) -> dict[str, Path]:
    """In which file each tensor lies, by the index where there is one."""
    single = folder / "model.safetensors"
    if single.is_file():
        with safe_open(single, "pt") as held:
            return dict.fromkeys(held.keys(), single)
    if not (folder / INDEX).is_file():
        return {}
    index = json.loads((folder / INDEX).read_text())
    return {name: folder / file for name, file in index["weight_map"].items()}


def load(done: Export, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """The model, which computes in `dtype`, and how the files differ from what it expects (then it cannot run)."""
    auto = installed_transformers()
    options = {"trust_remote_code": done.remote_code}
    config = auto.AutoConfig.from_pretrained(done.folder, local_files_only=True, **options)
    with parameters_on_meta():
        model = auto.AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
    model.tie_weights()
    stored = WeightFiles(done.folder)
    tied = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: tied[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    wanted = {names.get(name, name): tuple(values.shape) for name, values in model.state_dict().items()}
    if faults := stored.faults(wanted):
        return model, faults
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    branches = (branch for layer in model.model.layers for branch in (layer.self_attn, layer.mlp))
    parts = list(dict.fromkeys([*tables, *branches]))
    Layerwise(model, parts, lambda name: stored.read(names[name]).to(dtype)).hook(parts)
    return model, []
