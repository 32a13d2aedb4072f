"""Causal attention of new tokens over those before them, whose keys and values are kept, and over themselves.

One softmax in parts that are put together by their log-sum-exps: each page of earlier keys, all of which every new
token sees; the new tokens' own, causal; and at each token the slots of earlier depth. So no mask is made, and a page
never has to be copied beside another. CUDA's kernel wants head dims in multiples of 8: pages for it have zeros there,
so that none has to be copied for them either.

Shapes: B batch, H heads in G groups of R, one group per KV head, S new tokens, T kept ones of a page, K head dim.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbench.residual.protocol import DepthKV

from .depth_sdpa import dots, flash_forward, spread

Page = tuple[Tensor, Tensor]
"""Keys (rotated) and values, [B, G, T, K] each, or with zeros after each head's K (`head_padding`)."""


def head_padding(head_dim: int, element: int, device: str) -> int:
    """Zeros that a page has after a head's keys and values, of `element` bytes each: none but for CUDA's kernel, which
    takes half precisions alone."""
    return -head_dim % 8 if device == "cuda" and element == 2 else 0


class Past(Protocol):
    """One layer's keys and values of the tokens before those of a call; start: how many there are."""

    @property
    def start(self) -> int: ...

    def pages(self) -> Sequence[Page]: ...

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Those of the call's own tokens, [B, G, S, K], for later calls."""


class _Softmax:
    """A softmax over what has been added to it, summed in float32 or better, in place of the first part."""

    def __init__(self, out: Tensor, lse: Tensor, dtype: torch.dtype) -> None:
        self.out, self.lse = out.to(dtype), lse.to(dtype)

    def rescale(self, lse: Tensor) -> Tensor:
        """Make room for scores of this log-sum-exp; what to add to `out` has to be divided by exp of the result."""
        joint = torch.logaddexp(self.lse, lse)
        self.out *= (self.lse - joint).exp().unsqueeze(-1)
        self.lse = joint
        return joint

    def add(self, out: Tensor, lse: Tensor) -> None:
        joint = self.rescale(lse)
        self.out.addcmul_((lse - joint).exp().unsqueeze(-1), out.to(self.out.dtype))


def cached_attention(q: Tensor, k: Tensor, v: Tensor, past: Sequence[Page], depth: DepthKV | None) -> Tensor:
    """Attention of q [B, H, S, K] over the pages of `past` (zeros after K are as many in each), over k, v [B, G, S, K]
    (causal) and over `depth`'s keys and values (same token only, [B, G, S, K] a slot). Query head j meets KV head
    floor(j * G / H). Scaled by 1/sqrt(K).

    Returns [B, H, S, K] in q's dtype.
    """
    scale, heads, groups, size = 1 / math.sqrt(q.shape[-1]), q.shape[1], k.shape[1], q.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse, _ = flash_forward(q, spread(k, heads), spread(v, heads), scale)
    if not past and depth is None:
        return out
    softmax = _Softmax(out.unflatten(1, (groups, -1)), lse.unflatten(1, (groups, -1)), wide)
    del out
    q_BGRSK = q.unflatten(1, (groups, -1))
    rows_BGTK = q_BGRSK.flatten(2, 3)  # all queries see the same keys, so those of a group need no keys of their own
    if past and (padding := past[0][0].shape[-1] - size):  # so that the kernel pads no page
        rows_BGTK = F.pad(rows_BGTK, (0, padding))
    sizes_RS = q_BGRSK.shape[2:4]
    for page_k, page_v in past:
        part, part_lse, _ = flash_forward(rows_BGTK, page_k, page_v, scale, causal=False)
        softmax.add(part[..., :size].unflatten(2, sizes_RS), part_lse.to(wide).unflatten(2, sizes_RS))
    if depth is not None:
        keys, values = ([slot.unsqueeze(2) for slot in slots] for slots in depth)
        logits_NBGRS = dots(q_BGRSK.to(wide), keys).mul_(scale)
        joint = softmax.rescale(torch.logsumexp(logits_NBGRS, 0))
        for weight, value in zip(logits_NBGRS.sub_(joint).exp_().unsqueeze(-1), values, strict=True):
            softmax.out.addcmul_(weight, value)
    return softmax.out.flatten(1, 2).to(q.dtype)
