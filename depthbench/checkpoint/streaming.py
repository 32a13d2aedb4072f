"""Tensors written in torch's distributed checkpoint format by one process, each made only when its turn comes."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

_SHORT_WRITE = "inline_container"  # the part of torch that finds fewer bytes in a file than it wrote


class Planned(NamedTuple):
    """A tensor to be written under `key`."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _OneByOne(DefaultSavePlanner):
    """Plans from tensors on the meta device, and makes each when it is to be written."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.make = make

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor, planned = self.make(index.fqn), self.state_dict[index.fqn]
        assert (tensor.shape, tensor.dtype) == (planned.shape, planned.dtype), f"{index.fqn}: {tensor.shape}"
        return tensor


def write_tensors(folder: Path, tensors: Iterable[Planned], make: Callable[[str], Tensor]) -> None:
    """Write `tensors` into `folder`, in files of one tensor: within a file torch keeps what it has written.

    make: gives a tensor, of the planned shape and type, by its key; called once for each. What it raises comes through.

    Raises OSError where the disk is full.
    """
    state = {each.key: torch.empty(each.shape, dtype=each.dtype, device="meta") for each in tensors}
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        try:
            save(state, storage_writer=writer, planner=_OneByOne(make), no_dist=True)
        except CheckpointException as wrapped:
            error = wrapped.failures[0][0]
            if isinstance(error, RuntimeError) and _SHORT_WRITE in str(error):
                raise OSError(f"torch could not write a file to its end; is the disk full? ({error})") from None
            raise error from None
