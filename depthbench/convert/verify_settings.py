"""Whether an export's config.json says what the checkpoint was trained with. A wrong eps, base or scaling of RoPE may
change logits on a few tokens too little to be seen, and is another model all the same."""

from typing import Any

import torch

from depthbench.model.config import ModelConfig
from depthbench.model.rope_scaling import inverse_frequencies

from .export import Export
from .huggingface import CONFIG, settings_in
from .weight_files import read_json

_APART = ("rope_theta", "rope_scaling")  # compared by what they do
_FREE = ("init_std",)  # a trained model does not depend on it


def settings_faults(done: Export) -> list[str]:
    """What differs between the checkpoint's settings and those that an import reads from the export."""
    run = done.weights.run
    model, architecture, residual = settings_in(read_json(done.folder / CONFIG), done.folder)
    fields = model.in_effect()
    pairs: list[tuple[str, Any, Any]] = [
        *(
            (f"model.{name}", ours, fields[name])
            for name, ours in run.model.in_effect().items()
            if name not in (*_APART, *_FREE)
        ),
        ("residual.architecture", run.architecture, architecture),
        ("residual", run.residual, residual),
    ]
    found = [
        f"{name} is {theirs} in config.json, {ours} in the checkpoint" for name, ours, theirs in pairs if ours != theirs
    ]
    if not _rotates_alike(run.model, model):
        found.append(
            f"RoPE is theta {model.rope_theta:g}, {model.rope_scaling} in config.json, theta {run.model.rope_theta:g}, "
            f"{run.model.rope_scaling} in the checkpoint"
        )
    return found


def _rotates_alike(ours: ModelConfig, theirs: ModelConfig) -> bool:
    """Not by the settings: an export writes one kind of scaling as another base."""
    (a, factor_a), (b, factor_b) = (
        inverse_frequencies(m.head_size, m.rope_theta, m.rope_scaling) for m in (ours, theirs)
    )
    return torch.allclose(a, b, rtol=1e-9, atol=0) and abs(factor_a - factor_b) <= 1e-9
