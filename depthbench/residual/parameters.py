"""What every parameter declares about itself: its place, its gradient's reduction, its decay, its first value.

Megatron-Core infers these from attributes and shapes (a replicated parameter's gradient is summed over tensor-parallel
ranks only if it carries `sequence_parallel`; one-dimensional parameters lose their weight decay). A new residual
parameter falls through all of these silently, so here nothing is inferred: a parameter without a declaration is an
error in `depthbench.parallel.placement`, which alone acts on the declarations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Init = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""(global shape, generator) -> float32 tensor of that shape. The generator is private to the parameter."""


def constant(value: float) -> Init:
    return lambda shape, generator: torch.full(shape, value)


def fixed(values: Tensor) -> Init:
    """The given values, whatever the seed."""
    return lambda shape, generator: values.to(torch.float32).reshape(shape)


def truncated_normal(std: float) -> Init:
    """Normal with nominal deviation `std`, cut at three of them (conventions 15)."""

    def init(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        low = 0.5 * (1 + math.erf(-3 / math.sqrt(2)))
        uniform = torch.empty(shape).uniform_(low, 1 - low, generator=generator)
        return torch.erfinv(2 * uniform - 1).mul_(std * math.sqrt(2)).clamp_(-3 * std, 3 * std)

    return init


@dataclass(frozen=True)
class Part:
    """One logical tensor inside a stored parameter. A fused projection stores several, one after the other by rows.

    name: replaces the last module component of the parameter's name (`attention.qkv.weight` -> `attention.q.weight`);
        empty for a parameter that is not fused.
    shape: global shape, without padding.
    """

    name: str
    shape: tuple[int, ...]
    init: Init


@dataclass(frozen=True)
class ParameterSpec:
    """Declaration carried by a parameter as `parameter.spec`.

    parts: the logical tensors it stores.
    shard_axis: axis along which tensor-parallel ranks divide it; None if every rank holds all of it.
    local_tokens: its gradient comes from the rank's own tokens alone when activations are sequence-sharded, so it is
        summed over tensor-parallel ranks then. False for parameters that see every token.
    decay: whether weight decay applies.
    """

    parts: tuple[Part, ...]
    shard_axis: int | None
    local_tokens: bool
    decay: bool


def declare(parameter: nn.Parameter, spec: ParameterSpec) -> nn.Parameter:
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def residual_parameter(
    shape: tuple[int, ...], init: Init, *, dtype: torch.dtype, decay: bool = True, keep_float32: bool = False
) -> nn.Parameter:
    """A parameter of a residual connection: replicated, and reading only the rank's own tokens.

    keep_float32: store it in float32 (float64 in float64 models) even if the model is bfloat16.
    """
    stored = torch.promote_types(dtype, torch.float32) if keep_float32 else dtype
    spec = ParameterSpec((Part("", shape, init),), shard_axis=None, local_tokens=True, decay=decay)
    return declare(nn.Parameter(torch.empty(shape, dtype=stored)), spec)
