"""What a rank holds between steps."""

from collections.abc import Iterator

from torch import Tensor

from .optimizer import Optimizer
from .wrapped import WrappedModel


def held_bytes(model: WrappedModel, optimizer: Optimizer) -> int:
    """Bytes of weights, gradient buffers, master weights and moments on this rank."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in _held(model, optimizer)}
    return sum(storage.nbytes() for storage in storages.values())


def _held(model: WrappedModel, optimizer: Optimizer) -> Iterator[Tensor]:
    for stage in model.stages:
        yield from stage.parameters()
        yield from stage.buffers()
    for chunk in model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield from (data for data in (buffer.param_data, buffer.grad_data) if data is not None)
    for group in optimizer.torch_optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.torch_optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
