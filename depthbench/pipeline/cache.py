"""What a stage keeps of the history for its later chunks, and how gradients find back to where it was made.

A history tensor comes into a stage once: in a message, or made by a chunk. Later chunks of the stage read a leaf that
shares its memory. Their gradients are summed here, in float32 or better, and added to the tensor's own gradient where
it came in: the schedule runs a stage's chunks in reverse in backward, so by then the sum is complete. No message
carries it.

Keys are (microbatch, name). Nothing here is touched inside a checkpointed region, whose replay runs while the schedule
is at another microbatch.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

Key = tuple[int, str]


class HistoryCache:
    """Of one stage. Empty between steps."""

    def __init__(self) -> None:
        self.values: dict[Key, Tensor] = {}
        self.pending: dict[Key, Tensor] = {}
        self.bytes = self.peak_bytes = 0

    def clear(self) -> None:
        """Also forget what an interrupted step has left."""
        self.values.clear()
        self.pending.clear()
        self.bytes = self.peak_bytes = 0

    def keep(self, key: Key, tensor: Tensor) -> None:
        assert key not in self.values, f"{key} is cached already"
        self.values[key] = tensor.detach()
        self.bytes += tensor.nbytes
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def take(self, key: Key, *, last: bool) -> Tensor:
        """A leaf for one chunk. last: the value is not needed again."""
        value = self.values.pop(key) if last else self.values[key]
        if last:
            self.bytes -= value.nbytes
        if not torch.is_grad_enabled():
            return value
        leaf = value.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(lambda leaf: self._collect(key, leaf))
        return leaf

    def _collect(self, key: Key, leaf: Tensor) -> None:
        assert leaf.grad is not None
        grad = leaf.grad
        leaf.grad = None
        dtype = torch.promote_types(grad.dtype, torch.float32)
        if key in self.pending:
            self.pending[key] += grad
        else:
            self.pending[key] = grad.to(dtype, copy=True)

    def deliver(self, key: Key, grad: Tensor) -> Tensor:
        """The gradient of a tensor that came into the stage, with what later chunks have left for it; rounded once."""
        later = self.pending.pop(key, None)
        return grad if later is None else (later + grad).to(grad.dtype)

    def assert_empty(self) -> None:
        left = sorted({*self.values, *self.pending})
        assert not left, f"the history cache still holds {_some(left)} after a step"


def _some(keys: Iterable[Key]) -> str:
    keys = list(keys)
    return f"{keys[:5]}" + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
