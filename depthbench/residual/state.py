"""The depth state: what one token's computation carries from sublayer to sublayer.

Two kinds of named tensors. *Live* tensors are replaced as depth goes on (`h`; the streams of HC; a running sum).
*History* tensors are made once, never changed, and read by any later sublayer (AttnRes sources, MoDA's depth keys and
values). A pipeline edge always carries the live ones, and of the history only what the receiving rank lacks.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor


class DepthState(NamedTuple):
    """Immutable: `write` returns a new one and shares the tensors. Insertion order is depth order.

    Tensors are [S, B, ...]: S this rank's tokens (a TP-th of the sequence under sequence parallelism, unless the
    tensor is sharded by head), B the microbatch.

    ahead: what a sublayer has computed for later ones of the same stage, by their number. It never crosses an edge: a
    reader that finds nothing there computes for itself.
    """

    live: dict[str, Tensor]
    history: dict[str, Tensor]
    ahead: Mapping[int, Any] = MappingProxyType({})


class Placement(enum.Enum):
    """How tensor-parallel ranks share a state tensor."""

    TOKENS = "tokens"  # follows the activations: sharded along the sequence iff sequence parallelism is on
    KV_HEADS = "kv_heads"  # always sharded by key/value head, all tokens present


@dataclass(frozen=True)
class TensorSpec:
    """One state tensor: [S, B, *shape] in the compute dtype, `shape` unsharded."""

    name: str
    shape: tuple[int, ...]
    placement: Placement = Placement.TOKENS


@dataclass(frozen=True)
class StateSpec:
    """Everything a depth state holds at one depth."""

    live: tuple[TensorSpec, ...]
    history: tuple[TensorSpec, ...]
