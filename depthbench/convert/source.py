"""What an import reads from: weights that lie under other names, in another format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from depthbench.model.config import ModelConfig


class Source(Protocol):
    """A foreign model as depthbench sees it.

    model, architecture, residual: as in a run's settings; `residual` is the architecture's own config object.
    dtypes: of every tensor as it is stored there, by logical name (`blocks.0.attention.q.weight`).
    tokenizer: file or folder, where one comes along. origin: plain data that says what it is, for the manifest.
    """

    model: ModelConfig
    architecture: str
    residual: Any
    dtypes: Mapping[str, torch.dtype]
    tokenizer: Path | None
    origin: dict[str, Any]

    def read(self, name: str) -> Tensor:
        """One whole logical tensor as it is stored."""
