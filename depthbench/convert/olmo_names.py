"""Names and shapes of a model's tensors in DepthBench's checkpoints, of which each holds one of ours or several."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.residual import Residual
from depthbench.residual.olmo import OlmoFormat

from .names import Exported, named_tensors

# ours -> theirs; {a} and {f} are the paths of the attention and feed-forward modules
_SHARED = {
    "attention.q.weight": "{a}.w_q.weight",
    "attention.k.weight": "{a}.w_k.weight",
    "attention.v.weight": "{a}.w_v.weight",
    "attention.out.weight": "{a}.w_out.weight",
    "mlp.gate.weight": "{f}.w1.weight",
    "mlp.up.weight": "{f}.w3.weight",
    "mlp.down.weight": "{f}.w2.weight",
    "attention_residual.norm.weight": "attention_norm.weight",
    "mlp_residual.norm.weight": "feed_forward_norm.weight",
    "embedding.weight": "embeddings.weight",
    "readout.norm.weight": "lm_head.norm.weight",
    "head.weight": "lm_head.w_out.weight",
}
_BLOCK = re.compile(r"blocks\.\d+\.")


@dataclass(frozen=True)
class OlmoTensor:
    """A tensor of theirs: `parts` of ours, one after the other by rows."""

    name: str
    parts: tuple[Exported, ...]
    shape: tuple[int, ...]


def olmo_tensors(model: ModelConfig, residual: Residual, dtype: torch.dtype) -> list[OlmoTensor]:
    """All tensors that their form of the model has, in depth order. dtype: as `named_tensors`."""
    form = residual.olmo
    assert form is not None
    table = {ours: theirs.format(a=form.attention, f=form.feed_forward) for ours, theirs in _SHARED.items()}
    table |= form.names
    parts: dict[str, list[Exported]] = {}
    for tensor in named_tensors(model, residual, dtype, llama=False):
        block, local = _split(tensor.logical)
        parts.setdefault(block + table[local], []).append(tensor)
    return [OlmoTensor(name, tuple(held), _shape(name, held, form)) for name, held in parts.items()]


def _split(name: str) -> tuple[str, str]:
    """The block's prefix, if there is one, and the rest."""
    match = _BLOCK.match(name)
    return (match[0], name[match.end() :]) if match else ("", name)


def _shape(name: str, parts: list[Exported], form: OlmoFormat) -> tuple[int, ...]:
    first = parts[0].shape
    if _split(name)[1] in form.rows:
        return (1, *first)
    return (sum(part.shape[0] for part in parts), *first[1:]) if len(parts) > 1 else first


def first_name(name: str, form: OlmoFormat) -> str:
    """The name of a tensor that may lie under an alias."""
    block, local = _split(name)
    for alias, first in form.aliases.items():
        if local.startswith(alias):
            return block + first + local.removeprefix(alias)
    return name


def check_tensors(
    where: str, stored: dict[str, tuple[int, ...]], wanted: Iterable[OlmoTensor], form: OlmoFormat
) -> dict[str, list[str]]:
    """Find the wanted tensors among the stored ones: each one's name -> all names under which it lies.

    Raises UserError which lists what is missing, has another shape, or belongs to no part of the model.
    """
    places: dict[str, list[str]] = {}
    for name in sorted(stored):
        places.setdefault(first_name(name, form), []).append(name)
    found, missing, shaped = {}, [], []
    for tensor in wanted:
        names = places.pop(tensor.name, None)
        if names is None:
            missing.append(f"{tensor.name} {list(tensor.shape)}")
            continue
        shaped += [
            f"{n} {list(stored[n])} where {list(tensor.shape)} is due" for n in names if stored[n] != tensor.shape
        ]
        found[tensor.name] = sorted(names, key=lambda name: name != tensor.name)  # its own name first
    left = [name for name in places if _split(name)[1] not in form.unused]
    kinds = ((missing, "missing"), (shaped, "of another shape"), (left, "left over"))
    faults = [f"{len(names)} {kind} ({_few(names)})" for names, kind in kinds if names]
    if faults:
        raise UserError(f"{where} does not hold the tensors that its config.json describes: {'; '.join(faults)}")
    return found


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", and {len(names) - 4} more" if len(names) > 4 else "")
