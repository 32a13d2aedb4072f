"""Where a chunk begins and ends: messages become a depth state and a depth state becomes a message."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthbench.residual import Residual
from depthbench.residual.state import DepthState

from . import message
from .cache import HistoryCache, Key
from .edges import Edge, Retention, Shares, edges, retentions
from .layout import Layout


class _Arrive(torch.autograd.Function):
    """A message -> its tensors, as views of it. keys: the cache's keys of those that are kept for later chunks."""

    @staticmethod
    def forward(
        ctx: Any, cache: HistoryCache, keys: list[Key | None], shapes: message.Shapes, packed: Tensor
    ) -> tuple[Tensor, ...]:
        tensors = message.parts(packed.detach(), shapes)
        _keep(cache, keys, tensors)
        ctx.cache, ctx.keys, ctx.shapes = cache, keys, shapes
        ctx.dtype, ctx.device = packed.dtype, packed.device
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        packed = message.buffer(ctx.shapes, ctx.dtype, ctx.device)
        for part, key, grad in zip(message.parts(packed, ctx.shapes), ctx.keys, grads, strict=True):
            part.copy_(grad if key is None else ctx.cache.deliver(key, grad))
        return None, None, None, packed


class _Depart(torch.autograd.Function):
    """Tensors -> a message. keys: the cache's keys of those that this chunk has made and keeps for later ones."""

    @staticmethod
    def forward(ctx: Any, cache: HistoryCache, keys: list[Key | None], *tensors: Tensor) -> Tensor:
        _keep(cache, keys, tensors)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        packed = message.buffer(shapes, tensors[0].dtype, tensors[0].device)
        for part, tensor in zip(message.parts(packed, shapes), tensors, strict=True):
            part.copy_(tensor)
        ctx.cache, ctx.keys, ctx.shapes = cache, keys, shapes
        return packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, packed: Tensor) -> Any:
        grads = message.parts(packed, ctx.shapes)
        delivered = (g if key is None else ctx.cache.deliver(key, g) for g, key in zip(grads, ctx.keys, strict=True))
        return None, None, *delivered


def _keep(cache: HistoryCache, keys: list[Key | None], tensors: Any) -> None:
    for key, tensor in zip(keys, tensors, strict=True):
        if key is not None:
            cache.keep(key, tensor)


class Boundary:
    """Both ends of one chunk."""

    def __init__(
        self,
        chunk: int,
        arriving: Edge | None,
        departing: Edge | None,
        kept: Retention,
        shares: Shares,
        cache: HistoryCache,
    ) -> None:
        self.chunk, self.arriving, self.departing, self.kept = chunk, arriving, departing, kept
        self.shares, self.cache = shares, cache

    def arrive(self, packed: Tensor, microbatch: int) -> DepthState:
        """The state before the chunk's first sublayer, from the message of the edge that leads here and the cache."""
        assert self.arriving
        names = [spec.name for spec in self.arriving.tensors]
        local = self.shares.of(microbatch)
        shapes = [local.shape(spec) for spec in self.arriving.tensors]
        keys = [(microbatch, name) if name in self.kept.kept else None for name in names]
        arrived = dict(zip(names, _Arrive.apply(self.cache, keys, shapes, packed), strict=True))
        for name in self.kept.taken:
            arrived[name] = self.cache.take((microbatch, name), last=name in self.kept.last)
        live = {spec.name: arrived[spec.name] for spec in self.arriving.live}
        return DepthState(live, {spec.name: arrived[spec.name] for spec in self.arriving.whole})

    def depart(self, state: DepthState, microbatch: int) -> Tensor:
        """The message of the edge that leads from here. What this chunk has made goes to the cache as it is packed."""
        assert self.departing
        known = set() if self.arriving is None else {spec.name for spec in self.arriving.whole}
        tensors: Mapping[str, Tensor] = {**state.live, **state.history}
        names = [spec.name for spec in self.departing.tensors]
        made = self.kept.kept - known
        assert made <= set(names), f"chunk {self.chunk} keeps {sorted(made - set(names))}, which it does not send"
        keys = [(microbatch, name) if name in made else None for name in names]
        packed: Tensor = _Depart.apply(self.cache, keys, *(tensors[name] for name in names))
        return packed


def boundaries(
    residual: Residual, layout: Layout, stage: int, shares: Shares, cache_history: bool, cache: HistoryCache
) -> list[Boundary]:
    """Of a stage's chunks."""
    between = edges(residual, layout, cache_history)
    kept = retentions(residual, layout, cache_history)
    return [
        Boundary(
            chunk,
            between[chunk - 1] if chunk else None,
            between[chunk] if chunk < len(between) else None,
            kept[chunk],
            shares,
            cache,
        )
        for chunk in layout.chunks_of(stage)
    ]
