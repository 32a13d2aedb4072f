"""Tensors of a torch distributed checkpoint, read whole and one at a time, whoever wrote it, without process group."""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from depthbench.errors import UserError

_PACKAGES = ("torch.distributed.", "megatron.core.dist_checkpointing.")
_SINGLE = {
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("pathlib", "PosixPath"),
    ("torch.serialization", "_get_layout"),
}


class _Unpickler(pickle.Unpickler):
    """Knows classes of torch and Megatron-Core alone. OLMo-core's record of a tensor's place, which has the fields of
    torch's, is read as torch's."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("olmo_core.") and name == _StorageInfo.__name__:
            return _StorageInfo
        if (module, name) in _SINGLE:
            return super().find_class(module, name)
        if module == "torch" or module.startswith(_PACKAGES):
            found = super().find_class(module, name)
            if isinstance(found, type | torch.dtype | torch.layout):
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


class _Reader(FileSystemReader):
    """Torch's reader asks for the metadata at every load; once is enough."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._known = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._known


class StoredTensors:
    """shapes, dtypes: of every tensor whose key starts with `prefix`, by the rest of its key."""

    def __init__(self, folder: Path, metadata: Metadata, prefix: str) -> None:
        """metadata: the folder's; its data files are there, see `damage`."""
        self.prefix = prefix
        stored = {
            key.removeprefix(prefix): entry
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self.shapes = {name: tuple(entry.size) for name, entry in stored.items()}
        self.dtypes = {name: entry.properties.dtype for name, entry in stored.items()}
        self._reader = _Reader(folder, metadata)

    def read(self, name: str) -> Tensor:
        """One whole tensor as it is stored."""
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group
            load({self.prefix + name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN included."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))


def read_metadata(folder: Path) -> Metadata:
    """Of a folder that anybody may have written. Raises UserError where it cannot be read."""
    try:
        metadata: Metadata = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except Exception as error:  # a pickle that is cut short fails in many ways
        raise UserError(f"{folder / '.metadata'} cannot be read ({error})") from error
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = None
    return metadata


def damage(folder: Path, metadata: Metadata) -> str | None:
    """What is wrong with the first data file that is missing or shorter than the metadata says."""
    needed: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sorted(needed.items()):
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < size:
            return f"{name} is missing" if found is None else f"{name} has {found} bytes where {size} were written"
    return None
