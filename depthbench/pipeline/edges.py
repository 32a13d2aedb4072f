"""What crosses each edge, from the layout and the architecture's description of its state alone.

Edge c leads from chunk c to chunk c + 1. Live tensors always cross. History crosses if the receiving *stage* lacks it:
with K(c) the history before chunk c, the stage of chunk c holds K(c - P + 1) if it has run chunk c - P, so the edge
into chunk c carries K(c) for c < P and K(c) without K(c - P + 1) later: what chunks c - P + 1 .. c - 1 made, P - 1
chunks' worth. (The paper's scheme, arXiv 2603.15031 §4.1, sends what the receiver had not *received*: P chunks' worth.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from depthbench.residual import Residual
from depthbench.residual.state import Placement, TensorSpec

from .layout import Layout


@dataclass(frozen=True)
class Local:
    """How much of a state tensor a rank holds. sequence: tokens of the whole sequence; microbatch: sequences."""

    sequence: int
    microbatch: int
    tensor_parallel: int
    sequence_parallel: bool

    def shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """[S, B, ...] on this rank."""
        if spec.placement is Placement.KV_HEADS:
            heads, *rest = spec.shape
            return (self.sequence, self.microbatch, heads // self.tensor_parallel, *rest)
        tokens = self.sequence // (self.tensor_parallel if self.sequence_parallel else 1)
        return (tokens, self.microbatch, *spec.shape)

    def numel(self, *specs: TensorSpec) -> int:
        return sum(prod(self.shape(spec)) for spec in specs)


@dataclass
class Shares:
    """What a rank holds of each microbatch: `own` where a pass has microbatches of different lengths, as inference has,
    else the usual."""

    usual: Local
    own: Sequence[Local] = field(default=())

    def of(self, microbatch: int) -> Local:
        return self.own[microbatch] if self.own else self.usual


@dataclass(frozen=True)
class Edge:
    """sender, receiver: chunks. history: what is sent of it; whole: all that the receiving chunk reads; paper: what the
    AttnRes paper's scheme sends."""

    sender: int
    receiver: int
    live: tuple[TensorSpec, ...]
    history: tuple[TensorSpec, ...]
    whole: tuple[TensorSpec, ...]
    paper: tuple[TensorSpec, ...]

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """In the order in which a message packs them."""
        return self.live + self.history


def edges(residual: Residual, layout: Layout, cache: bool) -> list[Edge]:
    """The edges of a pipeline, in depth order. cache: False sends all history over every edge."""
    stages = layout.num_stages
    found = []
    for receiver in range(1, layout.num_chunks):
        state = residual.state_at(layout.sublayer(receiver))
        delta, paper = state.history, state.history
        if receiver >= stages:
            delta = _without(state.history, residual, layout.sublayer(receiver - stages + 1))
            paper = _without(state.history, residual, layout.sublayer(receiver - stages))
        sent = delta if cache else state.history
        found.append(Edge(receiver - 1, receiver, state.live, sent, state.history, paper))
    return found


def _without(history: tuple[TensorSpec, ...], residual: Residual, sublayer: int) -> tuple[TensorSpec, ...]:
    known = {spec.name for spec in residual.state_at(sublayer).history}
    return tuple(spec for spec in history if spec.name not in known)


@dataclass(frozen=True)
class Retention:
    """History that one chunk takes from its stage's cache and leaves there.

    taken: not in the message, so from the cache. last: those of them that no later chunk of the stage reads. kept:
    what arrives in this chunk, or is made by it, for a later chunk of the stage.
    """

    taken: tuple[str, ...]
    last: frozenset[str]
    kept: frozenset[str]


def retentions(residual: Residual, layout: Layout, cache: bool) -> list[Retention]:
    """For each chunk, in depth order."""
    if not cache:
        return [Retention((), frozenset(), frozenset())] * layout.num_chunks
    chunks = range(layout.num_chunks)
    read = [[spec.name for spec in residual.state_at(layout.sublayer(chunk)).history] for chunk in chunks]
    sent = {edge.receiver: {spec.name for spec in edge.history} for edge in edges(residual, layout, cache)}
    found = []
    for chunk in chunks:
        later = {
            name for c in range(chunk + layout.num_stages, layout.num_chunks, layout.num_stages) for name in read[c]
        }
        taken = tuple(name for name in read[chunk] if chunk and name not in sent[chunk])
        # what the next chunk reads and this one did not find in the cache has arrived here or is made here
        after = read[chunk + 1] if chunk + 1 < layout.num_chunks else []
        kept = (set(after) | set(read[chunk])) & later - set(taken)
        found.append(Retention(taken, frozenset(taken) - later, frozenset(kept)))
    return found
