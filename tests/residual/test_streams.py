"""The operations of residual streams against their equations: values, gradients, precision, what they keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from depthbench.residual.stream_mixing import read_streams, rms_projection, write_streams

S, B, D, M = 5, 3, 37, 7  # tokens, microbatch, a width that is no power of two, columns of coefficients
EPS = 1e-2  # large enough to be felt
STREAMS = pytest.mark.parametrize("n", [1, 2, 4, 8])


def naive_projection(x: Tensor, weight: Tensor) -> Tensor:
    return (x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)) @ weight


def naive_read(streams: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([weight[..., s, None] * streams[..., s, :] for s in range(streams.shape[-2])]).sum(0)


def naive_write(streams: Tensor, mix: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    written = [naive_read(streams, mix[..., t, :]) + spread[..., t, None] * y for t in range(streams.shape[-2])]
    return torch.stack(written, -2)


Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
"""An operation, its equation and arguments; streams first, coefficients in float32 or better."""


def case(name: str, n: int, dtype: torch.dtype = torch.float64, width: int = D, tokens: int = S) -> Case:
    """Coefficients are views with gaps, as columns of one product are, and the mix is transposed as HC's is."""
    generator = torch.Generator().manual_seed(n)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape: int, kind: torch.dtype = wide) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)

    streams = draw(tokens, B, n, width, kind=dtype)
    coefficients = draw(tokens, B, n, n + 2)
    weight, mix, spread = coefficients[..., 0], coefficients[..., 1:-1].mT, coefficients[..., -1]
    if name == "read":
        return read_streams, naive_read, [streams, weight]
    if name == "write":
        return write_streams, naive_write, [streams, mix, spread, draw(tokens, B, width, kind=dtype)]
    x = streams.flatten(-2) if name == "joint projection" else streams  # mHC's, HC's
    return (
        lambda x, weight: rms_projection(x, weight, EPS),
        naive_projection,
        [x, draw(x.shape[-1], M) / x.shape[-1] ** 0.5],
    )


OPERATIONS = pytest.mark.parametrize("name", ["projection", "joint projection", "read", "write"])


def results(function: Callable[..., Tensor], arguments: list[Tensor]) -> list[Tensor]:
    """The value and every argument's gradient."""
    leaves = [argument.detach().requires_grad_() for argument in arguments]
    value = function(*leaves)
    generator = torch.Generator().manual_seed(9)
    upstream = (
        torch.randn(value.shape[::-1], generator=generator, dtype=torch.float64)
        .bfloat16()
        .permute(*reversed(range(value.ndim)))
    )
    return [value.detach(), *torch.autograd.grad(value, leaves, upstream.to(value))]


@STREAMS
@OPERATIONS
def test_float64(name: str, n: int) -> None:
    ours, naive, arguments = case(name, n)
    found, expected = results(ours, arguments), results(naive, arguments)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-13)
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12 * float(other.abs().max()))


@pytest.mark.parametrize("n", [1, 3])
@OPERATIONS
def test_gradcheck(name: str, n: int) -> None:
    ours, _, arguments = case(name, n, width=5, tokens=2)
    torch.autograd.gradcheck(ours, [argument.detach().requires_grad_() for argument in arguments])


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_transposed_mix_would_show(n: int) -> None:
    _, _, (streams, mix, spread, y) = case("write", n)
    written = write_streams(streams, mix, spread, y)
    assert (write_streams(streams, mix.mT, spread, y) - written).abs().max() > 1


@STREAMS
@OPERATIONS
def test_bfloat16_is_rounded_once(name: str, n: int) -> None:
    """bfloat16 streams and float32 coefficients, against float64 of the same values: what is returned in bfloat16 is
    off by its own rounding (2^-8), what is in float32 by nothing."""
    ours, naive, arguments = case(name, n, torch.bfloat16, width=300)
    found = results(ours, arguments)
    expected = results(naive, [argument.double() for argument in arguments])
    assert found[0].dtype is (torch.float32 if "projection" in name else torch.bfloat16)
    assert [gradient.dtype for gradient in found[1:]] == [argument.dtype for argument in arguments]
    for one, other in zip(found, expected, strict=True):
        rounding = 2**-8 if one.dtype is torch.bfloat16 else 0.0
        error = (one.double() - other).abs() - rounding * other.abs() * 1.01
        assert float(error.max() / other.abs().max()) < 2e-5


@STREAMS
@OPERATIONS
def test_what_is_kept_for_backward(name: str, n: int) -> None:
    """The arguments, and of a projection its result and the norms."""
    ours, _, arguments = case(name, n, torch.bfloat16, width=300)
    leaves = [argument.requires_grad_() for argument in arguments]
    kept: list[Any] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        ours(*leaves)
    given = {argument.untyped_storage().data_ptr() for argument in arguments}
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    rows = {"projection": S * B * n, "joint projection": S * B}.get(name, 0)
    assert sum(size for place, size in own.items() if place not in given) == rows * (M + 1) * 4
