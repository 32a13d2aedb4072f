"""A learned read over depth, and how the reads of a stage share their passes over the sources."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from .depth_attention import Ahead, attend_ahead, depth_attention
from .parameters import constant, residual_parameter
from .state import DepthState


class DepthRead(nn.Module):
    """Attention over a state's history and live tensors with a learned query and, unless `key_norm_eps` is None, a
    learned gain of the normalised keys. `followers` are the later reads of its group."""

    def __init__(
        self, sublayer: int, width: int, key_norm_eps: float | None, temperature: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.sublayer, self.eps, self.temperature = sublayer, key_norm_eps, temperature
        self.query = residual_parameter((width,), constant(0.0), dtype=dtype, keep_float32=True)
        if key_norm_eps is not None:
            self.key_norm = residual_parameter((width,), constant(1.0), dtype=dtype, keep_float32=True)
        self.followers: list[DepthRead] = []

    def forward(self) -> Tensor:
        """[D], what sources are multiplied with. A call of the module, for the reason `Connection.forward` gives."""
        gain_D = 1.0 if self.eps is None else self.key_norm
        return self.query * gain_D / self.temperature

    def mix(self, state: DepthState) -> tuple[Tensor, Mapping[int, Ahead]]:
        """z [S, B, D], and what is known ahead for the reads that follow."""
        sources, live = list(state.history.values()), list(state.live.values())
        ahead = dict(state.ahead)
        group = [self, *self.followers]
        if self.sublayer not in ahead and two_phases_read_less(len(group), len(sources)):
            found = attend_ahead(sources, [read() for read in group], self.eps)
            ahead = {read.sublayer: one for read, one in zip(group, found, strict=True)}
        mine = ahead.pop(self.sublayer, None)
        if mine is None:
            return depth_attention([*sources, *live], self(), self.eps), ahead
        return depth_attention([*sources[mine.num_sources :], *live], mine.w_D, self.eps, mine), ahead


def two_phases_read_less(num_queries: int, num_sources: int) -> bool:
    """One pass over the sources, and a mixture written and read again for each query, against a pass a query."""
    return num_sources + 2 * num_queries < num_queries * num_sources


def link(groups: Iterable[list[DepthRead]], most: int | None = None) -> None:
    """Tell each read of a group, given in depth order, which come after it. most: reads that are done at once."""
    for group in groups:
        for place, read in enumerate(group):
            read.followers = group[place + 1 : None if most is None else place + most]


def done_ahead(group: list[int], num_sources: Callable[[int], int], most: int | None) -> list[list[int]]:
    """The parts of a group of sublayers whose reads are done at once, by the rule of `DepthRead.mix`."""
    parts, rest = [], group
    while rest:
        part = rest[:most]
        if two_phases_read_less(len(part), num_sources(part[0])):
            parts.append(part)
            rest = rest[len(part) :]
        else:
            rest = rest[1:]
    return parts
