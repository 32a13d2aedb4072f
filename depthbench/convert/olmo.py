"""A checkpoint of DepthBench's own code (a fork of OLMo-core) as an import reads it.

<run>/step7600/config.json       settings of the experiment
<run>/step7600/model_and_optim/  torch's distributed checkpoint: `model.<name>`, and the optimizer's state
<run>/tokenizer/                 or inside the step's folder
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthbench.checkpoint.stored import StoredTensors, damage, read_metadata, same_bits
from depthbench.errors import UserError

from .olmo_config import OlmoModel, read_model
from .olmo_names import OlmoTensor, check_tensors, olmo_tensors

CONFIG, TENSORS, TOKENIZER = "config.json", "model_and_optim", "tokenizer"
_STEP = re.compile(r"step(\d+)")


def is_olmo(path: Path) -> bool:
    """Whether `path` is, or holds, such a checkpoint: one step's folder, or a run's."""
    return (path / TENSORS).is_dir() or any((step / TENSORS).is_dir() for step in path.glob("step*"))


def step_folder(path: Path) -> Path:
    """The folder of one step: `path` itself, or the newest of a run's.

    Raises UserError where there is none.
    """
    if (path / TENSORS).is_dir():
        return path
    steps = [(int(m[1]), step) for step in path.glob("step*") if (m := _STEP.fullmatch(step.name))]
    whole = [(number, step) for number, step in steps if (step / TENSORS / ".metadata").is_file()]
    if not whole:
        raise UserError(
            f"{path} is no checkpoint of DepthBench's code: expected {CONFIG} and {TENSORS}/ in it, or in folders "
            f"step1000, step2000, ... of a run"
        )
    return max(whole)[1]


class OlmoSource:
    """Implements `Source`. unsaid: fields of the architecture's config which no checkpoint of this kind says, with the
    values that revisions of DepthBench's code gave them; `residual` has the first, or what was given."""

    def __init__(self, path: Path, given: Mapping[str, Any] | None = None) -> None:
        """given: values of such fields.

        Raises UserError for another layout, a model that depthbench does not compute, or tensors that do not fit.
        """
        self.folder = step_folder(path)
        said = read_model(_config(self.folder), str(self.folder / CONFIG))
        self.model, self.architecture = said.model, said.architecture.name
        self.unsaid = {name: values for name, values in said.unsaid.items() if name not in (given or {})}
        self.residual = _residual_config(said, given or {})
        residual = said.architecture(self.residual, said.model.residual_shape)
        metadata = read_metadata(self.folder / TENSORS)
        if fault := damage(self.folder / TENSORS, metadata):
            raise UserError(f"{self.folder / TENSORS}: {fault}")
        self._stored = StoredTensors(self.folder / TENSORS, metadata, "model.")
        tensors = olmo_tensors(said.model, residual, torch.float32)
        assert residual.olmo is not None
        self._names = check_tensors(str(self.folder / TENSORS), self._stored.shapes, tensors, residual.olmo)
        self._holders = {part.logical: tensor for tensor in tensors for part in tensor.parts}
        first = {tensor.name: self._names[tensor.name][0] for tensor in tensors}
        self.dtypes: Mapping[str, torch.dtype] = {
            ours: self._stored.dtypes[first[tensor.name]] for ours, tensor in self._holders.items()
        }
        places = (self.folder / TOKENIZER, self.folder.resolve().parent / TOKENIZER)
        self.tokenizer = next((place for place in places if place.is_dir()), None)
        self.origin = self._origin()

    def _origin(self) -> dict[str, Any]:
        match = _STEP.fullmatch(self.folder.resolve().name)
        return {
            "format": "DepthBench",
            "path": str(self.folder.resolve()),
            "step": int(match[1]) if match else None,
        }

    def read(self, name: str) -> Tensor:
        """One whole logical tensor as it is stored.

        Raises UserError where it lies there under two names and they differ.
        """
        holder = self._holders[name]
        whole = self._whole(holder)
        first = 0
        for part in holder.parts:
            rows = part.shape[0] if len(holder.parts) > 1 else None
            if part.logical == name:
                own = whole if rows is None else whole[first : first + rows].clone()
                return own.reshape(part.shape)
            first += rows or 0
        raise AssertionError(name)

    def _whole(self, tensor: OlmoTensor) -> Tensor:
        first, *others = self._names[tensor.name]
        whole = self._stored.read(first)
        for other in others:
            if not same_bits(whole, self._stored.read(other)):
                raise UserError(f"{self.folder / TENSORS}: {first} and {other} are one tensor, but their values differ")
        return whole


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from error
    return config if isinstance(config, dict) else {}


def _residual_config(said: OlmoModel, given: Mapping[str, Any]) -> Any:
    unknown = given.keys() - said.unsaid.keys()
    if unknown:
        free = ", ".join(said.unsaid) or "nothing"
        raise UserError(f"residual.{min(unknown)} is said by the checkpoint's config.json; what can be given: {free}")
    for name, value in given.items():
        if value not in said.unsaid[name]:
            raise UserError(f"residual.{name}={value} must be one of {', '.join(map(str, said.unsaid[name]))}")
    first = {name: values[0] for name, values in said.unsaid.items()}
    return said.architecture.Config(**{**said.residual, **first, **given})
