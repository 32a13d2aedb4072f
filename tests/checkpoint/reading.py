"""Reading a checkpoint without the product: torch's own reader, no process group."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(stored.size, dtype=stored.properties.dtype)
        for key, stored in metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    load(state, checkpoint_id=path, no_dist=True)
    return state


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Keys whose tensors are not bit-equal, `random.cpu` (one row a rank) left out."""
    keys = (ours.keys() | theirs.keys()) - {"random.cpu"}
    return sorted(k for k in keys if k not in ours or k not in theirs or not torch.equal(ours[k], theirs[k]))
