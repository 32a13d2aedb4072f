"""A checkpoint that one process writes, tensor by tensor."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from depthbench.checkpoint.streaming import Planned, write_tensors

TENSORS = {
    "model.a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "model.b": torch.ones(4, dtype=torch.bfloat16),
    "model.scalar": torch.tensor(0.5, dtype=torch.float64),
}
PLANNED = [Planned(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


def test_torch_reads_what_was_written_and_each_tensor_was_made_once(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> Tensor:
        made.append(name)
        return TENSORS[name]

    write_tensors(tmp_path, PLANNED, make)
    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
    assert sorted(made) == sorted(TENSORS)


def test_an_error_of_the_maker_comes_through(tmp_path: Path) -> None:
    def make(name: str) -> Tensor:
        raise FileNotFoundError(name)

    with pytest.raises(FileNotFoundError, match=r"model\.a"):
        write_tensors(tmp_path, PLANNED[:1], make)
