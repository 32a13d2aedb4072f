"""One buffer holds a header and an edge's tensors, and the header is believed rather than the position."""

import re
import struct
from math import prod

import pytest
import torch
from torch import Tensor

from depthbench.pipeline.message import (
    HEADER_BYTES,
    Label,
    MessageError,
    buffer,
    check_header,
    header_elements,
    parts,
    write_header,
)

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SHAPES = [(3, 2, 8), (3, 2, 2, 5), (3, 2, 4, 8)]
FORWARD, BACKWARD = Label(False, 3, 5), Label(True, 3, 5)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def filled(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A message and what was put in."""
    draw = torch.Generator().manual_seed(3)
    tensors = [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in SHAPES]
    packed = buffer(SHAPES, dtype, CPU)
    for part, tensor in zip(parts(packed, SHAPES), tensors, strict=True):
        part.copy_(tensor)
    return packed, tensors


@each_dtype
def test_what_is_packed_comes_out_again(dtype: torch.dtype) -> None:
    """Bit by bit, in order, and the header does not touch it."""
    packed, tensors = filled(dtype)
    write_header(packed, FORWARD, 9)
    check_header(packed, FORWARD, 9)
    for part, tensor in zip(parts(packed, SHAPES), tensors, strict=True):
        assert part.dtype is dtype and torch.equal(part, tensor)


@each_dtype
def test_parts_are_views_that_fill_the_buffer_behind_the_header(dtype: torch.dtype) -> None:
    """One after the other, without gaps, and contiguous."""
    packed = buffer(SHAPES, dtype, CPU)
    assert packed.shape == (HEADER_BYTES // dtype.itemsize + sum(map(prod, SHAPES)),)
    at = packed.data_ptr() + HEADER_BYTES
    for part, shape in zip(parts(packed, SHAPES), SHAPES, strict=True):
        assert part.shape == shape and part.is_contiguous() and part.data_ptr() == at
        at += part.nbytes
    assert at == packed.data_ptr() + packed.nbytes


@each_dtype
def test_the_header_is_four_numbers_in_sixteen_bytes(dtype: torch.dtype) -> None:
    """Signed receiver, microbatch, pass and format, whatever the dtype of the tensors."""
    assert HEADER_BYTES == 16 and header_elements(dtype) * dtype.itemsize == 16
    for label, receiver in ((FORWARD, 3), (BACKWARD, -3)):
        packed, _ = filled(dtype)
        before = bytes(packed.view(torch.uint8).tolist())
        write_header(packed, label, 9)
        after = bytes(packed.view(torch.uint8).tolist())
        assert struct.unpack("=3i", after[:12]) == (receiver, 5, 9)
        assert after[16:] == before[16:]
        check_header(packed, label, 9)


def test_a_header_can_be_written_on_a_leaf_that_needs_gradients_once_detached() -> None:
    """As the communicator does; the buffer is shared."""
    packed = buffer([(4,)], torch.float32, CPU).requires_grad_()
    write_header(packed.detach(), FORWARD, 1)
    check_header(packed, FORWARD, 1)


@pytest.mark.parametrize("number", [0, 1, 2**31 - 1, 2**31, 2**33 + 5])
def test_a_long_run_does_not_exhaust_the_number_of_the_pass(number: int) -> None:
    """It wraps at both ends alike."""
    packed = buffer([(4,)], torch.float64, CPU)
    write_header(packed, FORWARD, number)
    check_header(packed, FORWARD, number)
    with pytest.raises(MessageError):
        check_header(packed, FORWARD, number + 1)


@each_dtype
@pytest.mark.parametrize(
    ("sent", "number"),
    [(Label(False, 3, 4), 9), (BACKWARD, 9), (Label(False, 2, 5), 9), (FORWARD, 8)],
    ids=["microbatch", "direction", "edge", "pass"],
)
def test_another_message_is_refused_with_both_descriptions(dtype: torch.dtype, sent: Label, number: int) -> None:
    """What was expected and what came, each with its pass."""
    packed, _ = filled(dtype)
    write_header(packed, sent, number)
    expected = f"expected the {FORWARD} of pass 9, received the {sent} of pass {number}"
    with pytest.raises(MessageError, match=re.escape(expected)):
        check_header(packed, FORWARD, 9)


@each_dtype
def test_what_is_no_message_is_refused(dtype: torch.dtype) -> None:
    """Without a header it is only said what was expected."""
    for content in (torch.zeros, torch.ones):
        with pytest.raises(MessageError, match=re.escape(f"expected the {FORWARD}, received something that is no mes")):
            check_header(content(64, dtype=dtype), FORWARD, 9)


def test_a_label_names_its_chunks_in_the_direction_it_goes() -> None:
    """A gradient goes back into the chunk before."""
    assert str(FORWARD) == "forward message of microbatch 5, chunk 2 to 3"
    assert str(BACKWARD) == "backward message of microbatch 5, chunk 3 to 2"


@each_dtype
@pytest.mark.parametrize("shapes", [SHAPES[:2], [*SHAPES, (1,)], [(3, 2, 9), *SHAPES[1:]]])
def test_tensors_of_another_size_than_the_buffer_are_refused(dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    """Fewer, more or other ones."""
    packed = buffer(SHAPES, dtype, CPU)
    with pytest.raises((AssertionError, RuntimeError)):
        parts(packed, shapes)


def test_the_refusal_has_both_sizes() -> None:
    """Elements of the buffer, header included."""
    with pytest.raises(AssertionError, match="a buffer of 14 elements for tensors that need 10"):
        parts(buffer([(12,)], torch.float64, CPU), [(8,)])
