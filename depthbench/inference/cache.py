"""Keys and values of the tokens that a model has read, of the layers and KV heads that this rank has.

Static: one page of the whole capacity a layer, there from the start. Paged: pages of so many tokens, made when they are
first written to, so that what is held follows what was read; attention goes over pages one by one and never copies
them together.

Shapes: B batch, G KV heads of this rank, S tokens of a call, K head dim.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from depthbench.model.cached_attention import Page, Past


@dataclass(frozen=True)
class CacheShape:
    """Of one layer: batch size, KV heads of this rank, head dim, tokens there is room for, tokens of a page, zeros that
    a page has after each head's (`head_padding`)."""

    batch: int
    kv_heads: int
    head_dim: int
    capacity: int
    page: int
    padding: int = 0


class LayerCache:
    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.pages: list[Tensor] = []  # [2, B, G, tokens, K + padding] each

    def grow(self, tokens: int) -> None:
        """Have pages for the first `tokens`."""
        shape = self.shape
        while (begin := len(self.pages) * shape.page) < tokens:
            size = min(shape.page, shape.capacity - begin)
            sizes = (2, shape.batch, shape.kv_heads, size, shape.head_dim + shape.padding)
            page = torch.empty(sizes, dtype=self.dtype, device=self.device)
            page[..., shape.head_dim :] = 0
            self.pages.append(page)

    def before(self, end: int) -> list[Page]:
        """Keys and values of tokens [0, end), as views."""
        found = []
        for number in range(-(-end // self.shape.page)):
            keys, values = self.pages[number][:, :, :, : end - number * self.shape.page]
            found.append((keys, values))
        return found

    def write(self, start: int, k_BGSK: Tensor, v_BGSK: Tensor) -> None:
        """Those of tokens from `start` on."""
        stop, size = start + k_BGSK.shape[2], self.shape.head_dim
        self.grow(stop)
        for number in range(start // self.shape.page, -(-stop // self.shape.page)):
            first = number * self.shape.page
            begin, end = max(start, first), min(stop, first + self.shape.page)
            for mine, theirs in zip(self.pages[number], (k_BGSK, v_BGSK), strict=True):
                mine[:, :, begin - first : end - first, :size] = theirs[:, :, begin - start : end - start]


@dataclass(frozen=True)
class _Before:
    """`Past` of a call whose first `count` tokens, from `start` on, are real: the others are padding."""

    layer: LayerCache
    start: int
    count: int

    def pages(self) -> Sequence[Page]:
        return self.layer.before(self.start)

    def keep(self, k: Tensor, v: Tensor) -> None:
        self.layer.write(self.start, k[:, :, : self.count], v[:, :, : self.count])


class KVCache:
    """Of all `blocks` of this rank, by their global numbers."""

    def __init__(
        self, blocks: Iterable[int], shape: CacheShape, dtype: torch.dtype, device: torch.device, *, static: bool
    ) -> None:
        self.shape = shape
        self.layers = {block: LayerCache(shape, dtype, device) for block in blocks}
        if static:
            for layer in self.layers.values():
                layer.grow(shape.capacity)

    def pasts(self, blocks: Iterable[int], start: int, count: int) -> Mapping[int, Past]:
        """What each block's attention takes for a call with tokens [start, start + count), and padding after them."""
        return {block: _Before(self.layers[block], start, count) for block in blocks}

    @property
    def bytes(self) -> int:
        """What its pages take now."""
        return sum(page.nbytes for layer in self.layers.values() for page in layer.pages)
