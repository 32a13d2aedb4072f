"""What one rank does to run each chunk of a run's model on one microbatch: FLOPs, bytes moved in its memory, bytes
exchanged with its tensor-parallel group.

Counted from the code as it is built, in elements a token (D hidden, H heads, G KV heads, K head dim, F FFN width, V
vocabulary; e bytes an element, w of float32 or wider):

    RoPE                (H + G) K (2e + 11w)    each way; it works in float32
    attention           2 (H + G) K e           forward: q, k, v in, output out
    SwiGLU              5 F e, 13 F e           forward, backward
    cross entropy       V (e + 7w), V (2e + 8w) forward, backward; it works in float32
    residual path       per sublayer: its state twice in (a norm or weights, then the mix), new tensors once out, the
                        branch's input and output once each

Where no backward figure stands it is twice the forward one. The matmuls' own operands are in their reached FLOP/s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, residual_of
from depthbench.model.recompute import Recompute
from depthbench.residual import Residual, Shape, architecture
from depthbench.residual.state import Placement, StateSpec, TensorSpec

from .flops import BACKWARD_OVER_FORWARD
from .parameters import block_weights
from .pipeline import ELEMENT_BYTES


@dataclass(frozen=True)
class Work:
    """flops: of matmuls. traffic: bytes read and written by everything else. exchanged: bytes that the rank sends in
    its tensor-parallel group. collectives: how many calls that takes."""

    flops: float = 0.0
    traffic: float = 0.0
    exchanged: float = 0.0
    collectives: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.traffic + other.traffic,
            self.exchanged + other.exchanged,
            self.collectives + other.collectives,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(times * self.flops, times * self.traffic, times * self.exchanged, times * self.collectives)


@dataclass(frozen=True)
class ChunkWork:
    """Of one microbatch. recompute: what backward repeats of the forward pass, not contained in `backward`."""

    forward: Work
    backward: Work
    recompute: Work


@dataclass(frozen=True)
class _Widths:
    """Elements a token. tokens: of tensors that follow the activations; heads: of those divided by KV head."""

    tokens: int
    heads: int


def _widths(specs: Sequence[TensorSpec]) -> _Widths:
    by_placement = (
        sum(prod(spec.shape) for spec in specs if spec.placement is placement)
        for placement in (Placement.TOKENS, Placement.KV_HEADS)
    )
    return _Widths(*by_placement)


@dataclass(frozen=True)
class _Path:
    """The residual path. moved: what each sublayer moves forward, and last what the readout does. flops: forward, for
    each element moved; the whole path's are dealt out so."""

    moved: list[_Widths]
    flops: float


@lru_cache(maxsize=8)
def _path(name: str, config: Any, shape: Shape) -> _Path:
    residual: Residual = architecture(name)(config, shape)
    states = [residual.state_at(sublayer) for sublayer in range(shape.num_sublayers + 1)]
    moved = []
    for before, after in zip(states, [*states[1:], StateSpec((), ())], strict=True):
        state = before.live + before.history
        known = {spec.name for spec in before.history}
        new = after.live + tuple(spec for spec in after.history if spec.name not in known)
        read, written = _widths(state), _widths(new)
        branch = 2 * shape.hidden_size
        moved.append(_Widths(2 * read.tokens + written.tokens + branch, 2 * read.heads + written.heads))
    return _Path(moved, residual.flops_per_token().exact / sum(one.tokens + one.heads for one in moved))


def chunk_work(run: RunConfig) -> list[ChunkWork]:
    """Of each chunk in depth order, on one rank of its tensor-parallel group.

    Raises UserError where the layout or the residual settings cannot work at the model's shape.
    """
    layout, counter = layout_of(run), _Counter(run)
    chunks = []
    for chunk in range(layout.num_chunks):
        blocks = [counter.block(index) for index in range(*layout.span(chunk))]
        inner = sum((forward for forward, _ in blocks), Work())
        back = sum((backward for _, backward in blocks), Work())
        ends, ends_back = Work(), Work()
        if chunk == 0:
            ends, ends_back = counter.embedding()
        if chunk == layout.num_chunks - 1:
            head, head_back = counter.head()
            ends, ends_back = ends + head, ends_back + head_back
        chunks.append(ChunkWork(inner + ends, back + ends_back, counter.recomputed(inner)))
    return chunks


class _Counter:
    """Forward and backward work of the parts of a run's model, of one microbatch and rank."""

    def __init__(self, run: RunConfig) -> None:
        self.model, self.parallel = run.model, run.parallel
        self.element = ELEMENT_BYTES[run.train.precision]
        self.wide = max(4, self.element)
        self.microbatch, self.rank = run.train.micro_batch, run.parallel.tensor
        self.tokens = run.train.micro_batch * run.model.sequence_length
        self.own = self.tokens / (self.rank if run.parallel.shards_tokens else 1)  # of what follows the activations
        residual_of(run)  # settings that cannot work at this shape
        self.path = _path(run.architecture, run.residual, run.model.residual_shape)

    def residual(self, sublayer: int) -> Work:
        moved = self.path.moved[sublayer]
        flops = self.own * self.path.flops * (moved.tokens + moved.heads)
        traffic = self.element * (self.own * moved.tokens + self.tokens * moved.heads / self.rank)
        return Work(flops, traffic)

    def block(self, index: int) -> tuple[Work, Work]:
        model, e, w = self.model, self.element, self.wide
        share = self.tokens / self.rank
        heads, every = model.num_attention_heads * model.head_size, (model.num_attention_heads + model.kv_heads)
        pairs = self.microbatch * 2 * model.sequence_length * (model.sequence_length + 1) * heads / self.rank
        flops = 2 * share * block_weights(model) + pairs
        rope = share * every * model.head_size * (2 * e + 11 * w)
        attention = share * 2 * every * model.head_size * e
        swiglu = share * model.ffn_hidden_size * e
        path = self.residual(2 * index) + self.residual(2 * index + 1)
        forward = Work(flops, rope + attention + 5 * swiglu) + path + self.exchange(4)
        backward = (
            Work(BACKWARD_OVER_FORWARD * flops, rope + 2 * attention + 13 * swiglu)
            + path * BACKWARD_OVER_FORWARD
            # sequence parallelism gathers the two column-parallel inputs once more for their weights' gradients
            + self.exchange(6 if self.parallel.shards_tokens else 4)
        )
        return forward, backward

    def exchange(self, halves: int) -> Work:
        """So many gathers or scatters of a microbatch's hidden states; an all-reduce is one of each."""
        sent = self.tokens * self.model.hidden_size * self.element * (self.rank - 1) / self.rank
        calls = halves if self.parallel.shards_tokens else halves / 2
        return Work(exchanged=halves * sent, collectives=calls if self.rank > 1 else 0)

    def embedding(self) -> tuple[Work, Work]:
        sharded = self.parallel.shards_tokens
        table = Work(traffic=2 * self.tokens * self.model.hidden_size * self.element)
        return table + self.exchange(1 if sharded else 2), table * 2 + self.exchange(1 if sharded else 0)

    def head(self) -> tuple[Work, Work]:
        model, e, w = self.model, self.element, self.wide
        logits = self.tokens * model.vocab_size / self.rank
        flops = 2 * logits * model.hidden_size
        readout = self.residual(2 * model.num_layers)
        sharded = self.parallel.shards_tokens
        forward = Work(flops, logits * (e + 7 * w)) + readout + self.exchange(1 if sharded else 0)
        backward = Work(BACKWARD_OVER_FORWARD * flops, logits * (2 * e + 8 * w)) + readout * BACKWARD_OVER_FORWARD
        return forward, backward + self.exchange(2)

    def recomputed(self, blocks: Work) -> Work:
        """Of the blocks' forward work. Selective recomputation keeps what matmuls made, not what was exchanged."""
        mode = self.parallel.recompute
        if mode is Recompute.NONE:
            return Work()
        return blocks if mode is Recompute.FULL else Work(0.0, blocks.traffic, blocks.exchanged, blocks.collectives)
