"""An export as transformers builds it from its config.json, with its files' weights of one part in memory at a time."""

from typing import Any

import torch

from .export import Export
from .layerwise import Layerwise, parameters_on_meta
from .library import installed_transformers
from .names import tensor_faults
from .weight_files import WeightFiles


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
    faults = tensor_faults(stored.shapes, wanted, "the model makes")
    if faults := faults + [f"{name} is not where the index says" for name in stored.misplaced]:
        return model, faults
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    branches = (branch for layer in model.model.layers for branch in (layer.self_attn, layer.mlp))
    parts = list(dict.fromkeys([*tables, *branches]))
    Layerwise(model, parts, lambda name: stored.read(names[name]).to(dtype)).hook(parts)
    return model, []
