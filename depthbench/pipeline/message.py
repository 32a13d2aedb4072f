"""One edge's message: a header that says what it is, then the tensors, one after the other in one buffer.

The header is 16 bytes at the buffer's start, four int32: receiving chunk, with the sign of the direction; microbatch;
number of the pass; a format number. Positions in a schedule's table would be silent when wrong; the header is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

HEADER_BYTES = 16
_FORMAT = 0x0DB1
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Label:
    """backward: a gradient, of the message that went forward into chunk `receiver` (at least 1)."""

    backward: bool
    receiver: int
    microbatch: int

    def __str__(self) -> str:
        way = f"{self.receiver} to {self.receiver - 1}" if self.backward else f"{self.receiver - 1} to {self.receiver}"
        return f"{'backward' if self.backward else 'forward'} message of microbatch {self.microbatch}, chunk {way}"


class MessageError(RuntimeError):
    """A message is not the one that the schedule's table says comes next."""


def header_elements(dtype: torch.dtype) -> int:
    return HEADER_BYTES // dtype.itemsize


def buffer(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for a header and tensors of these shapes, one-dimensional."""
    return torch.empty(header_elements(dtype) + sum(map(prod, shapes)), dtype=dtype, device=device)


def parts(packed: Tensor, shapes: Shapes) -> list[Tensor]:
    """The tensors in a buffer, as views."""
    found, at = [], header_elements(packed.dtype)
    for shape in shapes:
        found.append(packed[at : at + prod(shape)].view(shape))
        at += prod(shape)
    assert at == packed.numel(), f"a buffer of {packed.numel()} elements for tensors that need {at}"
    return found


def write_header(packed: Tensor, label: Label, number: int) -> None:
    """number: of the pass over a global batch that the message belongs to."""
    receiver = -label.receiver if label.backward else label.receiver
    values = torch.tensor([receiver, label.microbatch, number & 0x7FFFFFFF, _FORMAT], dtype=torch.int32)
    packed[: header_elements(packed.dtype)].view(torch.int32).copy_(values, non_blocking=True)


def check_header(packed: Tensor, label: Label, number: int) -> None:
    """Raises MessageError. Waits for the device."""
    receiver, microbatch, sent, form = packed[: header_elements(packed.dtype)].view(torch.int32).tolist()
    found = Label(receiver < 0, abs(receiver), microbatch)
    if form != _FORMAT:
        raise MessageError(f"expected the {label}, received something that is no message of ours")
    if (found, sent) != (label, number & 0x7FFFFFFF):
        raise MessageError(f"expected the {label} of pass {number}, received the {found} of pass {sent}")
