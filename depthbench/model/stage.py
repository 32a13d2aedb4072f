"""A run of decoder blocks with, at the model's ends, the embedding and the head: what Megatron-Core's schedules call
a model chunk. It takes the place of `GPTModel` and `TransformerBlock`, which fix h + f(h).

Shapes: S sequence (this rank's share under sequence parallelism), B microbatch, D hidden, W local vocabulary.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, cast

from megatron.core.enums import ModelType
from torch import Tensor, nn

from depthbench.parallel.context import ParallelContext
from depthbench.residual import Residual
from depthbench.residual.parameters import Part, truncated_normal
from depthbench.residual.state import DepthState

from .attention import SelfAttention
from .cached_attention import Past
from .config import ModelConfig
from .linear import column_linear, shard_tokens, vocab_embedding
from .loss import vocab_parallel_cross_entropy
from .mlp import MLP
from .recompute import Recompute, recomputed
from .rope import Rope

Observer = Callable[[int, DepthState], None]
"""Called with the number of the sublayer that has just written, -1 for the embedding, and the state it wrote."""


class Boundary(Protocol):
    """How a stage that does not hold the whole model exchanges the depth state (`depthbench.pipeline.boundary`)."""

    def arrive(self, packed: Tensor, microbatch: int) -> DepthState: ...

    def depart(self, state: DepthState, microbatch: int) -> Tensor: ...


@dataclass(frozen=True)
class StageSpan:
    """Which blocks [first, last) a stage holds, of how many."""

    first: int
    last: int
    num_layers: int

    @property
    def has_embedding(self) -> bool:
        return self.first == 0

    @property
    def has_head(self) -> bool:
        return self.last == self.num_layers


class Block(nn.Module):
    """One attention and one MLP sublayer, each tied to the depth state by its connection."""

    def __init__(
        self, index: int, config: ModelConfig, residual: Residual, rope: Rope, context: ParallelContext
    ) -> None:
        super().__init__()
        dtype = context.megatron.params_dtype
        self.index = index
        self.attention = SelfAttention(config, residual, rope, context)
        self.attention_residual = residual.connection(2 * index, dtype)
        self.mlp = MLP(config, residual, index, context)
        self.mlp_residual = residual.connection(2 * index + 1, dtype)

    def forward(self, state: DepthState, observer: Observer | None = None, past: Past | None = None) -> DepthState:
        read = self.attention_residual(state)
        # what branches return is not held: taps are views of a whole matmul
        state = self.attention_residual.write(state, read, *self.attention(read.hidden, read.depth_kv, past))
        if observer:
            observer(2 * self.index, state)
        read = self.mlp_residual(state)
        state = self.mlp_residual.write(state, read, *self.mlp(read.hidden))
        if observer:
            observer(2 * self.index + 1, state)
        return state


class ScheduleSeam:
    """Where Megatron-Core's schedules leave the number of the microbatch that they are about to run."""

    def __init__(self) -> None:
        self.layers = [self]
        self.current_microbatch = 0


class DecoderStage(nn.Module):
    """Blocks `span.first` to `span.last` of the model; `blocks` is keyed by global number, so names are global.

    block_hook, when set, sees each block's output state (statistics); observer sees each sublayer's (fault finding).
    """

    def __init__(
        self,
        config: ModelConfig,
        residual: Residual,
        span: StageSpan,
        context: ParallelContext,
        recompute: Recompute = Recompute.NONE,
        boundary: Boundary | None = None,
        virtual_rank: int | None = None,
    ) -> None:
        super().__init__()
        # these six are read by Megatron-Core's schedules, DDP and reductions
        self.config = context.megatron
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage, self.pre_process, self.post_process = virtual_rank, span.has_embedding, span.has_head
        self.decoder = ScheduleSeam()
        self.boundary = boundary
        self.arrived: Tensor | None = None
        self.model_config, self.residual, self.span, self.context = config, residual, span, context
        self.recompute = recompute
        self.block_hook: Callable[[int, Tensor], None] | None = None
        self.observer: Observer | None = None
        padded = config.padded_vocab(context.tp_size)
        table = Part("", (config.vocab_size, config.hidden_size), truncated_normal(config.init_std))
        rope = Rope(config)
        if span.has_embedding:
            self.embedding = vocab_embedding(table, padded, context)
        self.blocks = nn.ModuleDict(
            {str(i): Block(i, config, residual, rope, context) for i in range(span.first, span.last)}
        )
        # a tied head on another stage than the embedding has a copy of its weight, whose gradients are summed
        self.tied_copy = config.tie_embeddings and span.has_head and not span.has_embedding
        if span.has_head:
            self.readout = residual.readout(context.megatron.params_dtype)
            own_weight = self.tied_copy or not config.tie_embeddings
            if self.tied_copy:
                table = replace(table, name="embedding")  # the same logical tensor as the embedding's
            self.head = column_linear([table], context, rows=padded, own_weight=own_weight)
        self.share_reads()

    def share_reads(self, most: int | None = None) -> None:
        """Let readers of the depth state share work, `most` of them at once (None: as many as the architecture
        likes)."""
        for readers in self._regions():
            self.residual.share(readers, most)

    def _regions(self) -> list[dict[int, nn.Module]]:
        """The depth state's readers, by sublayer, in groups between which a checkpoint saves the state."""
        regions: list[dict[int, nn.Module]] = []
        for block in cast(Iterable[Block], self.blocks.values()):
            regions.append({2 * block.index: block.attention_residual, 2 * block.index + 1: block.mlp_residual})
        if self.span.has_head:
            regions.append({2 * self.span.num_layers: self.readout})
        if self.recompute is Recompute.NONE:
            return [dict(ChainMap(*regions))]
        return regions

    def shard_tokens(self, on: bool) -> None:
        """Sequence parallelism in the calls to come, of a stage that was built for it."""
        self.context = replace(self.context, sequence_parallel=on)
        shard_tokens(self, on)

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """The schedule's way to hand over what the previous stage sent; the first stage gets None."""
        (self.arrived,) = tensors

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Per-token losses [S, B] over all tokens, float32 or better; of a stage without a head, its message."""
        microbatch = self.decoder.current_microbatch
        state = self.run_blocks(self.enter(tokens_BS, microbatch))
        if not self.span.has_head:
            return self.leave(state, microbatch)
        logits_SBW = self.logits(state)
        return vocab_parallel_cross_entropy(
            logits_SBW, labels_BS.transpose(0, 1), self.model_config.vocab_size, self.context
        )

    def enter(self, tokens_BS: Tensor | None, microbatch: int) -> DepthState:
        """The state before the stage's first block: of the tokens, or of what `set_input_tensor` has handed over."""
        if self.span.has_embedding:
            assert tokens_BS is not None
            state = self.residual.start(self.embed(tokens_BS))
            if self.observer:
                self.observer(-1, state)
            return state
        assert self.boundary is not None and self.arrived is not None, "this stage needs what another one sends"
        arrived, self.arrived = self.arrived, None
        return self.boundary.arrive(arrived, microbatch)

    def run_blocks(self, state: DepthState, pasts: Mapping[int, Past] | None = None) -> DepthState:
        """pasts: of each block's attention, in inference."""
        for index, block in self.blocks.items():
            past = (pasts[int(index)],) if pasts else ()
            state = recomputed(block, self.recompute)(state, self.observer, *past)
            if self.block_hook:
                self.block_hook(int(index), self.residual.probe(state))
        return state

    def leave(self, state: DepthState, microbatch: int) -> Tensor:
        """The message to the next stage."""
        assert self.boundary is not None, "this stage needs another one to send to"
        return self.boundary.depart(state, microbatch)

    @property
    def share_embeddings_and_output_weights(self) -> bool:
        """With the next method, what Megatron-Core asks of the first and last stage to sum a tied weight's gradient."""
        return self.model_config.tie_embeddings and self.span.has_embedding != self.span.has_head

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.embedding.weight if self.span.has_embedding else self.head.weight)

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """[S, B, D]."""
        embedded: Tensor = self.embedding(tokens_BS)
        return embedded if self.context.sequence_parallel else embedded.transpose(0, 1)

    def logits(self, state: DepthState) -> Tensor:
        """[S, B, W], S all tokens; padding rows are not masked."""
        return self.project(self.readout(state))

    def project(self, hidden_SBD: Tensor) -> Tensor:
        """The head, over what the readout gave for some tokens: as many on each rank if they are sharded."""
        weight = self.embedding.weight if self.model_config.tie_embeddings and not self.tied_copy else None
        logits: Tensor = self.head(hidden_SBD, weight)[0]
        return logits
