"""The safetensors files of a Hugging Face folder, as transformers finds them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from depthbench.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


class WeightFiles:
    """The tensors that transformers would load: those in the one file or, where there is none, in all that the index
    names.

    files: that hold them. shapes, dtypes: of each, by name. misplaced: names that do not lie in the file where the
    index says.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UserError for files that are missing or no safetensors, and for types that are no weights'."""
        index = None if (folder / SINGLE).is_file() else _index(folder)
        self.files = [folder / name for name in ([SINGLE] if index is None else sorted(set(index.values())))]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._places: dict[str, Path] = {}
        for file in self.files:
            self._open(file)
        self.misplaced = [name for name, file in self._places.items() if index and index.get(name) != file.name]

    def _open(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as held:
                for name in held.keys():  # noqa: SIM118
                    stored = held.get_slice(name)
                    if stored.get_dtype() not in _TYPES:
                        raise UserError(
                            f"{file}: {name} is stored as {stored.get_dtype()}, quantised or no weight; supported are "
                            f"{', '.join(_TYPES)}"
                        )
                    self.shapes[name] = tuple(stored.get_shape())
                    self.dtypes[name] = _TYPES[stored.get_dtype()]
                    self._places[name] = file
        except SafetensorError as error:
            raise UserError(f"{file} cannot be read as safetensors: {error}") from error

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        with safe_open(self._places[name], "pt") as held:
            tensor: Tensor = held.get_tensor(name)
        return tensor


def _index(folder: Path) -> dict[str, str]:
    """Tensor to file name. Raises UserError without an index, and naming those of its files that are missing."""
    if not (folder / INDEX).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"; it has {others[0]}, a pickle: save it as safetensors with transformers first" if others else ""
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise UserError(f"{folder / INDEX} has no weight_map")
    names = sorted(set(index.values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing)}")
    return index


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError where there is no such file, or no JSON object in it."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold an object, not {type(content).__name__}")
    return content
