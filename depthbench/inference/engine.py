"""A model that reads sequences piece by piece and keeps their keys and values.

Each piece goes through the stages as a microbatch does in training, with the same blocks, messages and history cache.
Every operation of a residual architecture is token-wise, so no depth state outlives its piece. With sequence
parallelism a rank holds its share of the piece's tokens between the matmuls; a single token is held by all ranks.

Shapes: B sequences, T tokens, S tokens of a piece (this rank's share between matmuls), D hidden, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbench.errors import UserError
from depthbench.model.cached_attention import head_padding
from depthbench.model.stage import DecoderStage
from depthbench.parallel.context import ParallelContext
from depthbench.pipeline.forward import run_forward
from depthbench.pipeline.transport import Transport
from depthbench.residual.state import DepthState

from .cache import CacheShape, KVCache
from .pieces import Piece, check_chunk, check_ids, cut, share


class Engine:
    """Changes its stages for good: their parameters ask for no gradients, their reads of the depth state share work as
    `most_ahead` says, and they share tokens as in the last call of `read`, of whichever engine.

    stages: this rank's, in depth order. transport: between stages, None where there is one alone. batch: sequences,
    all of one length. capacity: tokens of each that there is room for. page: tokens of a cache's page; None: all at
    once, from the start. most_ahead: reads of the depth state that are attended to at once, each of which keeps a
    mixture; None: as in training."""

    def __init__(
        self,
        stages: Sequence[DecoderStage],
        transport: Transport | None,
        batch: int,
        capacity: int,
        page: int | None = None,
        most_ahead: int | None = None,
    ) -> None:
        self.stages, self.transport, self.batch, self.capacity = list(stages), transport, batch, capacity
        self.context: ParallelContext = stages[0].context
        self.model = stages[0].model_config
        self.device = next(stages[0].parameters()).device
        # what the stages were built for, not their last call's
        self.sharded = self.context.megatron.sequence_parallel
        for stage in self.stages:
            stage.requires_grad_(False)
            stage.share_reads(most_ahead)
        ranks = self.context.tp_size
        blocks = [int(index) for stage in self.stages for index in stage.blocks]
        dtype, size = self.context.megatron.params_dtype, self.model.head_size
        padding = head_padding(size, dtype.itemsize, self.device.type)
        shape = CacheShape(batch, self.model.kv_heads // ranks, size, capacity, page or capacity, padding)
        self.cache = KVCache(blocks, shape, dtype, self.device, static=page is None)
        self.length = 0

    def reset(self) -> None:
        """Forget what was read; pages stay for what comes next."""
        self.length = 0

    @torch.no_grad()
    def read(self, tokens_BT: Tensor, chunk: int | None = None, *, every: bool = False) -> Tensor | None:
        """Go on reading. A collective call of all ranks.

        Args:
            tokens_BT: ids, alike on all ranks.
            chunk: tokens of a piece; None: all at once.
            every: logits of all positions, not of the last alone.

        Returns: on ranks of the last stage the logits, [B, V] or [B, T, V]; else None.

        Raises UserError for ids outside the vocabulary, for no tokens, for more than there is room for and for chunks
        of fewer tokens than the ranks that share them.
        """
        batch, count = tokens_BT.shape
        assert batch == self.batch, f"{batch} sequences where the cache has room for {self.batch}"
        self._check(tokens_BT)
        size = count if chunk is None else chunk
        sharded = self.sharded and count > 1
        ranks = self.context.tp_size if sharded else 1
        if chunk is not None:
            check_chunk(chunk, ranks)
        pieces = cut(self.length, count, size, ranks)
        for stage in self.stages:
            if stage.context.sequence_parallel is not sharded:
                stage.shard_tokens(sharded)
        found = _Reading(self, pieces, tokens_BT.to(self.device), every).run()
        self.length += count
        return found

    def from_last_stage(self, ids_B: Tensor | None) -> Tensor:
        """[B]: the ids that the first rank of the last stage gives, on every rank. A collective call of all.

        ids_B: None on ranks of other stages.
        """
        found = torch.zeros(self.batch, dtype=torch.long) if ids_B is None else ids_B
        found = found.to(self.device)
        torch.distributed.broadcast(found, torch.distributed.get_world_size() - self.context.tp_size)
        return found

    def _check(self, tokens_BT: Tensor) -> None:
        count = tokens_BT.shape[1]
        if count == 0:
            raise UserError("there is nothing to read: give at least one token")
        if self.length + count > self.capacity:
            raise UserError(
                f"{self.length + count} tokens do not fit a key-value cache of {self.capacity}: shorten the prompt, or "
                f"make room for {self.length + count - self.capacity} more"
            )
        check_ids(int(tokens_BT.min()), int(tokens_BT.max()), self.model.vocab_size)


class _Reading:
    """One call of `Engine.read`."""

    def __init__(self, engine: Engine, pieces: list[Piece], tokens_BT: Tensor, every: bool) -> None:
        self.engine, self.pieces, self.tokens_BT, self.every = engine, pieces, tokens_BT, every
        self.logits: list[Tensor] = []

    def run(self) -> Tensor | None:
        engine = self.engine
        if engine.transport is None:
            for number in range(len(self.pieces)):
                self._run_stage(0, number, None)
        else:
            context, sharded = engine.context, engine.stages[0].context.sequence_parallel
            shares = [share(piece, engine.batch, context.tp_size, sharded=sharded) for piece in self.pieces]
            run_forward(engine.transport, shares, self._run_stage)
        if not self.logits:
            return None
        return torch.cat(self.logits, 1) if self.every else self.logits[-1][:, -1]

    def _run_stage(self, virtual: int, number: int, arrived: Tensor | None) -> Tensor | None:
        stage, piece = self.engine.stages[virtual], self.pieces[number]
        stage.set_input_tensor([arrived])
        del arrived
        pasts = self.engine.cache.pasts(map(int, stage.blocks), piece.start, piece.count)
        # the state is in no variable here: its tensors go with their last reader
        if not stage.span.has_head:
            return stage.leave(stage.run_blocks(self._enter(stage, number), pasts), number)
        if self.every or number == len(self.pieces) - 1:
            hidden_SBD = stage.readout(stage.run_blocks(self._enter(stage, number), pasts))
            self.logits.append(self._logits(stage, hidden_SBD, piece))
        else:
            stage.run_blocks(self._enter(stage, number), pasts)
        return None

    def _enter(self, stage: DecoderStage, number: int) -> DepthState:
        """The state before the stage's blocks; observers see also one that another stage has sent."""
        state = stage.enter(self._tokens(self.pieces[number]), number)
        if stage.observer and not stage.span.has_embedding:
            stage.observer(2 * stage.span.first - 1, state)
        return state

    def _tokens(self, piece: Piece) -> Tensor:
        begin = piece.start - self.engine.length
        return F.pad(self.tokens_BT[:, begin : begin + piece.count], (0, piece.padding))

    def _logits(self, stage: DecoderStage, hidden_SBD: Tensor, piece: Piece) -> Tensor:
        """[B, S, V] of the piece's tokens, or of its last one."""
        if self.every:
            return self._whole(stage.project(hidden_SBD))[:, : piece.count]
        # of sharded tokens each rank gives one, at the place of the last one in its owner's share
        owner, place = divmod(piece.count - 1, hidden_SBD.shape[0])
        logits = self._whole(stage.project(hidden_SBD[place : place + 1].clone()))
        return logits[:, owner : owner + 1]

    def _whole(self, logits_SBW: Tensor) -> Tensor:
        """[B, S, V], from every rank's part of the vocabulary, without padding rows."""
        context = self.engine.context
        if context.tp_size > 1:
            parts = [torch.empty_like(logits_SBW) for _ in range(context.tp_size)]
            torch.distributed.all_gather(parts, logits_SBW.contiguous(), group=context.tp_group)
            logits_SBW = torch.cat(parts, -1)
        return logits_SBW[..., : self.engine.model.vocab_size].transpose(0, 1)
