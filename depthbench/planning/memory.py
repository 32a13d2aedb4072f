"""What a rank of each stage holds at the most in a step, counted from the code as it is built.

Elements a token (D hidden, H heads, G KV heads, K head dim, F FFN width, V vocabulary), kept for backward without
recomputation:

    attention    input D; q, k (rotated), v (H + 2G) K; output H K; log-sum-exp H in float32
    MLP          input D; gate and up 2F (and the architecture's own projections); silu F; product F
    residual     `Residual.kept`
    head         the readout; logits V

selective: a block's input state and its matmuls' and attention's outputs. full: its input state. Either way one block
is whole while backward is in it.
"""

from dataclasses import dataclass
from typing import Any

from depthbench.config.schema import Precision, RunConfig
from depthbench.config.validate import (
    data_parallel,
    layout_of,
    local_share,
    microbatch_group,
    microbatches,
    residual_of,
)
from depthbench.model.recompute import Recompute
from depthbench.pipeline.edges import edges, retentions
from depthbench.pipeline.order import runs

from .parameters import rank_weights
from .pipeline import ELEMENT_BYTES, STATE_BYTES, cached_bytes
from .schedule import warmup_runs


@dataclass(frozen=True)
class Kernels:
    """norm_copies: tensors of the statistics' dtype that an RMS norm keeps; keeps_input: whether its input beside them
    (in that dtype already, the input is one of them). fused_update: AdamW over all weights at once, with a copy of all;
    else one weight after another, with two copies of it."""

    norm_copies: int
    keeps_input: bool
    fused_update: bool


CUDA = Kernels(norm_copies=0, keeps_input=True, fused_update=True)
CPU = Kernels(norm_copies=2, keeps_input=False, fused_update=False)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of a stage.

    weights, gradients, optimizer: between steps as well; optimizer is master weights and moments. activations: of all
    microbatches in flight, history in the stage's cache with them (`history_cache` of that is kept for later chunks).
    messages: buffers between stages. backward: what comes and goes while backward is in one block or the loss, beyond
    what is kept (`logits` of that, as the head makes them). update: what the optimizer's step takes for a while; the
    pass's part is free then.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    history_cache: int
    messages: int
    backward: int
    logits: int
    update: int

    @property
    def peak(self) -> int:
        held = self.weights + self.gradients + self.optimizer
        return held + max(self.activations + self.messages + self.backward, self.update)

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "peak": self.peak}


def memory(run: RunConfig, world_size: int, kernels: Kernels = CUDA) -> list[RankMemory]:
    """Of each stage, on `world_size` processes.

    Raises UserError where the layout does not divide them or the residual settings cannot work at the model's shape.
    """
    cached = cached_bytes(run, world_size)
    return [_Stage(run, world_size, kernels, *each).memory() for each in enumerate(cached)]


def peak_memory(run: RunConfig, world_size: int) -> int:
    """Bytes of the fullest rank on a GPU. Raises UserError as `memory`."""
    return max(rank.peak for rank in memory(run, world_size))


def kv_cache_bytes(run: RunConfig, tokens: int) -> int:
    """Keys and values of one sequence on one process, in inference. No architecture keeps depth state across tokens."""
    model = run.model
    return 2 * model.num_layers * model.kv_heads * model.head_size * tokens * ELEMENT_BYTES[run.train.precision]


def assumptions(run: RunConfig) -> list[str]:
    """What `memory` takes for granted."""
    return [
        "memory is what tensors ask for: the allocator's rounding and fragments, NCCL's buffers, libraries' workspaces "
        "come on top, often some GB; what a cluster's GPU can allocate leaves room for the CUDA context alone",
        f"recomputation {run.parallel.recompute.value}; attention through a flash kernel, which keeps no scores",
        "norms in one kernel, which keeps its input alone (torch's on CUDA; old versions keep a float32 copy)",
        "gradients in one buffer of all weights; a weight's gradient also once on its own, while it is added to that",
        "the loss in float32 over all logits of a microbatch at once, with their gradient in the logits' dtype as well",
    ]


class _Stage:
    def __init__(self, run: RunConfig, world_size: int, kernels: Kernels, stage: int, cached: int) -> None:
        self.run, self.world_size, self.kernels, self.stage, self.cached = run, world_size, kernels, stage, cached
        self.residual, self.layout, self.local = residual_of(run), layout_of(run), local_share(run)
        self.replicas = data_parallel(run, world_size)
        self.element = ELEMENT_BYTES[run.train.precision]
        self.wide = max(4, self.element)  # statistics, logits in the loss
        self.ranks = run.parallel.tensor
        self.tokens = run.train.micro_batch * run.model.sequence_length
        self.own = self.tokens // (self.ranks if run.parallel.shards_tokens else 1)

    # -- between steps --------------------------------------------------------------------------------------------
    def memory(self) -> RankMemory:
        run, chunks = self.run, self.layout.chunks_of(self.stage)
        spans = [self.layout.span(chunk) for chunk in chunks]
        parts = [rank_weights(run, *span) for span in spans]
        count, largest = sum(part.total for part in parts), max(part.largest for part in parts)
        mixed = run.train.precision is Precision.BF16
        state = STATE_BYTES[run.train.precision]
        owned = -(-count // self.replicas) if run.parallel.distributed_optimizer else count
        updated = owned if self.kernels.fused_update else 2 * min(owned, largest)
        return RankMemory(
            stage=self.stage,
            weights=count * self.element,
            gradients=count * state,
            optimizer=owned * state * (3 if mixed else 2),
            activations=self._in_flight(),
            history_cache=self.cached,
            messages=self._messages(),
            # instead of backward a stage may be packing its next message
            backward=max(self._largest_messages()[0], *(self._backward(*span) for span in spans)),
            logits=self._logits() * self.element if self.layout.num_chunks - 1 in chunks else 0,
            update=updated * state,
        )

    # -- kept of a microbatch -------------------------------------------------------------------------------------
    def _read_and_write(self, sublayer: int) -> int:
        """Bytes that the residual path keeps."""
        kept, width = self.residual.kept(sublayer), self.run.model.hidden_size
        norms = kept.norms * width * self.own
        heads = self.tokens * kept.heads // self.ranks
        copies = norms * self.kernels.norm_copies * self.wide
        inputs = norms * self.element if self.kernels.keeps_input else 0
        return copies + inputs + self.element * (self.own * kept.tokens + heads) + 4 * self.own * kept.scalars

    def _matmuls(self, block: int) -> tuple[int, int]:
        """Elements of a block's first matmuls and attention, which selective recomputation keeps; of both branches'
        last matmuls, which it keeps too."""
        model = self.run.model
        extra = sum(projection.rows for projection in self.residual.extra_projections(block))
        heads = (2 * model.num_attention_heads + 2 * model.kv_heads) * model.head_size
        first = self.tokens * (heads + 2 * model.ffn_hidden_size + extra) // self.ranks
        return first, 2 * self.tokens * model.hidden_size

    def _block(self, block: int) -> int:
        """Bytes kept without recomputation. What attention keeps, q, k, v and its output, is as much as the matmul that
        made them and the output."""
        model = self.run.model
        first, _ = self._matmuls(block)
        inner = first + self.tokens * 2 * model.ffn_hidden_size // self.ranks
        inputs = 2 * self.own * model.hidden_size
        statistics = 4 * self.tokens * model.num_attention_heads // self.ranks
        path = self._read_and_write(2 * block) + self._read_and_write(2 * block + 1)
        return self.element * (inner + inputs) + statistics + path

    def _input(self, block: int) -> int:
        """Bytes of the live state before a block."""
        return self.element * self.local.numel(*self.residual.state_at(2 * block).live)

    def _history(self, last: int) -> dict[str, int]:
        """Elements, by name, of the history that the block before `last` reads or leaves."""
        states = [self.residual.state_at(2 * block) for block in (last - 1, last)]
        return {spec.name: self.local.numel(spec) for state in states for spec in state.history}

    def _chunk(self, chunk: int) -> int:
        """Bytes that a chunk keeps of a microbatch, with what the stage's later chunks read from its cache."""
        mode, (first, last) = self.run.parallel.recompute, self.layout.span(chunk)
        cached = self.run.pipeline.history_cache
        retained = retentions(self.residual, self.layout, cached)[chunk]
        known = self._history(last)
        before = {spec.name for spec in self.residual.state_at(2 * first).history}
        if mode is Recompute.NONE:
            arrived = before - set(retained.taken)
            history = sum(known.get(name, 0) for name in arrived) * self.element
            return sum(map(self._block, range(first, last))) + history
        read = {spec.name for spec in self.residual.state_at(2 * (last - 1)).history}
        needed = (read | retained.kept) - set(retained.taken)
        total = sum(known.get(name, 0) for name in needed) * self.element
        for block in range(first, last):
            total += self._input(block)
            if mode is Recompute.SELECTIVE:
                total += self.element * sum(self._matmuls(block))
        if mode is Recompute.SELECTIVE:
            total -= self.element * sum(known.get(name, 0) for name in needed & self._outputs(first, last))
        return total

    def _outputs(self, first: int, last: int) -> set[str]:
        """History that is a last matmul's output itself, as where sublayers have no live state to add theirs to."""
        found = set()
        for sublayer in range(2 * first, 2 * last):
            before, after = self.residual.state_at(sublayer), self.residual.state_at(sublayer + 1)
            if not before.live and not after.live:
                found |= {spec.name for spec in after.history} - {spec.name for spec in before.history}
        return found

    def _in_flight(self) -> int:
        """The most that a stage keeps of all microbatches at once."""
        group, count = microbatch_group(self.run), microbatches(self.run, self.world_size)
        kept = {chunk: self._chunk(chunk) for chunk in self.layout.chunks_of(self.stage)}
        forward = list(runs(self.layout, self.stage, count, group))
        backward = list(runs(self.layout, self.stage, count, group, backward=True))
        warmup = min(warmup_runs(self.layout, self.stage, group), len(forward))
        held = peak = 0
        for number, (chunk, _) in enumerate(forward):
            held += kept[chunk]
            peak = max(peak, held)
            if number >= warmup:
                held -= kept[backward[number - warmup][0]]
            if number > warmup + 2 * self.layout.chunks_per_stage * group and count % group == 0:
                break  # it repeats itself
        return peak

    # -- while a pass goes on -------------------------------------------------------------------------------------
    def _messages(self) -> int:
        """While a chunk runs backward: the last message sent forward, kept until it is through, the gradient that has
        come for it, and the gradient that leaves."""
        leaving, coming = self._largest_messages()
        return 2 * leaving + coming

    def _largest_messages(self) -> tuple[int, int]:
        """Bytes of those that leave and that come forward."""
        between = edges(self.residual, self.layout, self.run.pipeline.history_cache)
        sizes = {edge.receiver: self.element * self.local.numel(*edge.tensors) for edge in between}
        chunks = self.layout.chunks_of(self.stage)
        return max(sizes.get(chunk + 1, 0) for chunk in chunks), max(sizes.get(chunk, 0) for chunk in chunks)

    def _logits(self) -> int:
        """Elements."""
        return self.tokens * self.run.model.padded_vocab(self.ranks) // self.ranks

    def _backward(self, first: int, last: int) -> int:
        """Beyond what is kept: of a block's MLP, the gradients of gate and up with their weights' while the product is
        free already; before that, where it was recomputed, the rest of the block; of the loss, logits and more."""
        model, mode = self.run.model, self.run.parallel.recompute
        inner = self.tokens * model.ffn_hidden_size // self.ranks
        weight = 2 * model.ffn_hidden_size * model.hidden_size // self.ranks
        gathered = sum(self._history(last).values())  # gradients of what several blocks read
        block = self.element * (inner + weight + gathered)
        if mode is not Recompute.NONE:
            kept = self._matmuls(last - 1)[0] if mode is Recompute.SELECTIVE else 0
            block += max(map(self._block, range(first, last))) - self.element * kept
        if last < model.num_layers:
            return block
        rows, logits = model.padded_vocab(self.ranks) // self.ranks, self._logits()
        readout = self._read_and_write(2 * model.num_layers) + self.element * self.tokens * model.hidden_size
        # a float32 copy beside the logits, and at backward's end the gradient in the logits' own dtype beside both
        narrowed = self.element if self.element < self.wide else 0
        loss = readout + logits * (self.element + self.wide + narrowed)
        head = readout + self.element * (logits + rows * model.hidden_size)
        return max(block, loss, head)
