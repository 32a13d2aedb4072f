"""A checkpoint's logical tensors, read whole and one at a time, whatever layout saved them. No process group needed."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from depthbench.checkpoint.folder import Published, find
from depthbench.config.load import typed
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError

PREFIX = "model."


class _Reader(FileSystemReader):
    """Torch's reader asks for the metadata at every load; once is enough."""

    _known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata(*args, **kwargs)
        return self._known


class Weights:
    """The model's weights in a checkpoint, by logical name without the `model.` prefix.

    checkpoint, run: where they come from and the settings they were trained with.
    shapes, dtypes: of every tensor, known without reading any. A scalar is stored as one element and read as a scalar.
    """

    def __init__(self, path: Path) -> None:
        """path: a checkpoint, or a run folder (its newest one).

        Raises UserError where it is not complete, or its settings cannot be read.
        """
        self.checkpoint: Published = find(path)
        self.manifest = self.checkpoint.manifest()
        self.checkpoint.check_files()
        settings = self.manifest.get("settings")
        if not isinstance(settings, dict):
            raise UserError(f"checkpoint {self.checkpoint.path}: its manifest.json has no settings of the run")
        self.run: RunConfig = typed(settings)
        stored = {
            key.removeprefix(PREFIX): tensor
            for key, tensor in self.checkpoint.stored_tensors().items()
            if key.startswith(PREFIX)
        }
        self.shapes = {name: tuple(tensor.size) for name, tensor in stored.items()}
        self.dtypes = {name: tensor.properties.dtype for name, tensor in stored.items()}
        self._reader = _Reader(self.checkpoint.path)

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One whole tensor, of the shape it was checked to have, converted to `dtype`."""
        stored = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that there is no process group
            load({PREFIX + name: stored}, storage_reader=self._reader, no_dist=True)
        return stored.view(shape).to(dtype)
