"""What comes and goes on a rank while one piece of a text passes through a stage's blocks, beyond the depth state at
its fullest, counted from the code as it is built.

With T tokens of a piece (padded to a multiple of the ranks that share it, times the batch) and O of them a rank's own,
at a sublayer with N sources or slots of history, elements (those marked * in float32 or better):

    read        Q reads done ahead: O D* each until they are due; while they are made, logits O N Q* and inverse norms,
                and of a tile of tokens the sources, weights and mixtures; a read alone O D* and a wide copy of a source
    branch      its input O D; of an MLP's the live tensors that the block began with
      attention matmul (H + 2G) K T, its values again; q as it is rotated in two halves and put together*, then q and k
                rotated; output H K T, summed* where parts of the softmax are put together: for earlier pages q in rows
                of a group and their part; for depth slots wide q, products of one slot*, logits of all* twice; without
                a kernel (float32 and float64 on CUDA) three times the scores of the T tokens by a page's, or their own;
                on CUDA heads padded to multiples of 8 where they are none: q, k and v, rows and parts
      MLP       gate and up 2F T and extra projections, silu F T, product F T
    write       the new live tensors and a wide copy
    always      a buffer in which tokens are gathered, T D

Letters as in `memory.py`; H, G and F a rank's share.
"""

from dataclasses import dataclass
from functools import cached_property

from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.model.cached_attention import head_padding
from depthbench.pipeline.edges import Local
from depthbench.residual import Residual
from depthbench.residual.depth_attention import TILE_BYTES
from depthbench.residual.state import Placement

from .pipeline import ELEMENT_BYTES


@dataclass(frozen=True)
class Workspace:
    """local: what a rank holds of the longest piece. pairs: the most that a piece's tokens and the earlier ones on one
    page make, of one sequence; 0 where no piece has any before it. device: its type, by which tiles are cut and
    attention's kernel is chosen."""

    run: RunConfig
    local: Local
    most_ahead: int | None
    pairs: int
    device: str

    @cached_property
    def residual(self) -> Residual:
        return residual_of(self.run)

    @cached_property
    def element(self) -> int:
        return ELEMENT_BYTES[self.run.train.precision]

    @property
    def wide(self) -> int:
        return max(4, self.element)

    @property
    def tokens(self) -> int:
        return self.local.sequence * self.local.microbatch

    @property
    def own(self) -> int:
        return self.tokens // (self.local.tensor_parallel if self.local.sequence_parallel else 1)

    def state_bytes(self, sublayer: int) -> int:
        """Of the live and history tensors before a sublayer."""
        state = self.residual.state_at(sublayer)
        return self.element * self.local.numel(*state.live, *state.history)

    def beyond_state(self, first: int, last: int) -> int:
        """Bytes, of blocks [first, last)."""
        readers = 2 * last if last == self.run.model.num_layers else 2 * last - 1
        starting = {part[0]: len(part) for part in self.residual.reads_ahead(2 * first, readers, self.most_ahead)}
        mixture = self.wide * self.own * (self.run.model.hidden_size + 1)  # and its log-sum-exp
        kept = began = most = 0  # mixtures for reads to come: now, and in the state that the block began with
        for sublayer in range(2 * first, readers + 1):
            began = began if sublayer % 2 else kept
            held = self.state_bytes(sublayer) + self._held(sublayer)
            if sublayer in starting:
                stale, kept = began * (sublayer % 2), starting[sublayer]
                most = max(most, held + (stale + kept) * mixture + self._making(sublayer, kept))
                during = stale + kept - 1  # a read takes its own mixture with it
            else:
                during = max(kept, began)
            most = max(most, held + during * mixture + self._reading(sublayer))
            if sublayer < 2 * last:
                most = max(most, held + during * mixture + self._branch(sublayer))
            kept = max(kept - 1, 0)
        fullest = max(self.state_bytes(sublayer) for sublayer in range(2 * first, 2 * last + 1))
        # Megatron-Core keeps the buffer in which it gathers tokens
        return most - fullest + self.element * self._gathered

    def _held(self, sublayer: int) -> int:
        """Of an MLP's: the live tensors that the block began with, and what its attention had read."""
        if sublayer % 2 == 0:
            return 0
        began = self.local.numel(*self.residual.state_at(sublayer - 1).live)
        return self.element * (began + self.own * self.run.model.hidden_size)

    def _making(self, sublayer: int, queries: int) -> int:
        """Of so many reads ahead, beside their mixtures."""
        width, sources = self.run.model.hidden_size, len(self.residual.state_at(sublayer).history)
        rows = max(1, min(self.own, TILE_BYTES[self.device] // (self.wide * sources * width)))
        of_tile = min(2 * rows, self.own) * queries * (sources + width)  # the tile before is still there
        scalars = self.own * sources * (queries + 1)
        return self.wide * (scalars + rows * sources * width + of_tile)

    def _reading(self, sublayer: int) -> int:
        state = self.residual.state_at(sublayer)
        tensors = len(state.live) + len(state.history)
        return self.wide * self.own * (2 * self.run.model.hidden_size + 3 * tensors)

    def _branch(self, sublayer: int) -> int:
        width = self.run.model.hidden_size
        live = [self.local.numel(*self.residual.state_at(k).live) for k in (sublayer, sublayer + 1)]
        work = self._mlp(sublayer // 2) if sublayer % 2 else self._attention(sublayer)
        writing = (self.element + self.wide) * max(live)
        hidden = 0 if sublayer % 2 else self.own * width  # an MLP's is in the place of what its attention had read
        return self.element * hidden + max(work, writing)

    @property
    def _gathered(self) -> int:
        """Elements of a branch's input, all tokens."""
        return self.tokens * self.run.model.hidden_size if self.local.sequence_parallel else 0

    def _attention(self, sublayer: int) -> int:
        model, ranks, tokens = self.run.model, self.local.tensor_parallel, self.tokens
        element, wide, mixed = self.element, self.wide, self.element < self.wide
        q, k = (tokens * count // ranks * model.head_size for count in (model.num_attention_heads, model.kv_heads))
        grouped = k < q
        # every history tensor that is shared by head is a slot's key or value
        history = self.residual.state_at(sublayer).history
        slots = sum(spec.placement is Placement.KV_HEADS for spec in history) // 2
        scalars = wide * tokens * model.num_attention_heads // ranks  # one a token and head
        padding = head_padding(model.head_size, element, self.device)
        out = element * q * (model.head_size + padding) // model.head_size
        before = element * (q + 3 * k)
        rotating = before + wide * q * (3 if mixed else 2)
        held = before + element * (q + k)
        inputs = (2 * element * q if grouped else 0) + (3 * out if padding else 0)
        attending = held + inputs + scalars + self._part(self.local.sequence**2, out)
        projecting = held + out + element * (q + tokens * model.hidden_size)
        most = max(rotating, attending, projecting)
        if not (self.pairs or slots):
            return most
        merged = held + wide * q + 2 * scalars
        copies = wide * q if mixed else 0
        most = max(most, merged + (out if mixed else 0))
        if self.pairs:
            merged += out if grouped or padding else 0
            most = max(most, merged + max(self._part(self.pairs, out), out + copies))
        if slots:
            most = max(most, merged + copies + wide * q + 2 * slots * scalars)
        return most

    def _part(self, pairs: int, out: int) -> int:
        """Of attention with so many pairs of tokens a sequence, whose output takes `out`, while it is made."""
        if self.device != "cuda" or self.element == 2:
            return out
        # no kernel: scores, less their log-sum-exps, and the exponentials of these; then the first and the last
        heads = self.run.model.num_attention_heads // self.local.tensor_parallel
        scores = self.element * self.local.microbatch * heads * pairs
        return max(3 * scores, 2 * scores + out)

    def _mlp(self, block: int) -> int:
        model, ranks = self.run.model, self.local.tensor_parallel
        inner = self.tokens * model.ffn_hidden_size // ranks
        extra = sum(projection.rows for projection in self.residual.extra_projections(block))
        matmul = 2 * inner + self.tokens * extra // ranks
        width = self.tokens * model.hidden_size
        return self.element * (matmul + max(2 * inner, inner + width))
