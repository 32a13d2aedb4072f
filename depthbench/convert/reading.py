"""A checkpoint's logical tensors, read whole and one at a time, whatever layout saved them. No process group needed."""

from pathlib import Path

import torch
from torch import Tensor

from depthbench.checkpoint.folder import Published, find
from depthbench.checkpoint.stored import StoredTensors
from depthbench.config.load import typed
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError

PREFIX = "model."


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
        self._stored = StoredTensors(self.checkpoint.path, self.checkpoint.metadata, PREFIX)
        self.shapes, self.dtypes = self._stored.shapes, self._stored.dtypes

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """One whole tensor, of the shape it was checked to have, converted to `dtype`."""
        return self._stored.read(name).view(shape).to(dtype)
