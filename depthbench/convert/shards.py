"""Sharded safetensors, written with one shard in memory."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from depthbench.errors import UserError

from .memory import give_back
from .names import Exported
from .weight_files import INDEX, SINGLE

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str) -> int:
    """Bytes of `200MB`, `5GB` or a plain number. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise UserError(f"--max-shard-size={text} must be a number of bytes above 0, or like 500MB or 5GB")
    return size


def into_shards(tensors: Sequence[Exported], limit: int) -> list[list[Exported]]:
    """Runs of tensors of at most `limit` bytes; a larger tensor is alone in its shard."""
    shards: list[list[Exported]] = []
    size = limit
    for tensor in tensors:
        if size + tensor.bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    return shards


def write_shards(folder: Path, tensors: Sequence[Exported], limit: int, read: Callable[[Exported], Tensor]) -> None:
    """Write the model into `folder`: one file, or several and their index.

    read: gives a tensor's values in its shape and type, contiguous. OSError where the disk is full.
    """
    shards = into_shards(tensors, limit)
    places = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({tensor.name: read(tensor) for tensor in shard}, folder / name, metadata={"format": "pt"})
        give_back()
        places.update({tensor.name: name for tensor in shard})
    if len(shards) > 1:
        total = sum(tensor.bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
