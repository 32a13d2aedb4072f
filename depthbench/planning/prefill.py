"""What a rank holds at the most while a model reads a text in chunks, counted from the code as it is built.

With T tokens of a piece (padded to a multiple of the ranks that share it, times the batch) and O of them a rank's own:

    depth state   live and history, at the sublayer before which it is fullest: a source of AttnRes is O D elements
    workspace     what comes and goes besides, at the fullest moment:
      attention   hidden O D, gathered T D; matmul (H + 2G) K T, its values again, q and k rotated; output, and once
                  more in float32 while parts of the softmax are put together
      MLP         hidden O D; gate and up 2F T, silu F T, product F T
      residual    reads ahead O D each in float32 (`Residual.kept_ahead`), and tiles of sources while they are made;
                  live tensors that the block began with; a wide copy of those it writes
      messages    of a pipeline, one on its way

No part grows with the length of the text but the keys and values. Letters as in `memory.py`; H, G and F a rank's share.
"""

from dataclasses import dataclass
from typing import Any

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, residual_of
from depthbench.pipeline.edges import Local, edges
from depthbench.residual.depth_attention import TILE_BYTES

from .parameters import rank_weights
from .pipeline import ELEMENT_BYTES, cache_peaks


@dataclass(frozen=True)
class Reading:
    """tokens: of each of `batch` sequences. chunk: read at once. page: of the key-value cache; None: all at once.
    most_ahead: reads of the depth state done at once; None: as many as the architecture likes."""

    tokens: int
    chunk: int
    batch: int = 1
    page: int | None = None
    most_ahead: int | None = None


@dataclass(frozen=True)
class PrefillMemory:
    """Bytes on one rank of a stage. history_cache: what interleaved stages keep for their later chunks; the state has
    some of the same tensors, so there the peak is a bound."""

    stage: int
    weights: int
    kv_cache: int
    depth_state: int
    history_cache: int
    workspace: int

    @property
    def peak(self) -> int:
        return self.weights + self.kv_cache + self.depth_state + self.history_cache + self.workspace

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "peak": self.peak}


def local_of(run: RunConfig, reading: Reading) -> Local:
    """What a rank holds of the longest piece."""
    ranks, length = run.parallel.tensor, min(reading.chunk, reading.tokens)
    sharded = run.parallel.shards_tokens and reading.tokens > 1
    padded = -(-length // ranks) * ranks if sharded else length
    return Local(padded, reading.batch, ranks, sharded)


def depth_state_bytes(run: RunConfig, reading: Reading, first: int, last: int) -> int:
    """Of blocks [first, last): live and history tensors that a rank holds at the most."""
    residual, local = residual_of(run), local_of(run, reading)
    states = (residual.state_at(sublayer) for sublayer in range(2 * first, 2 * last + 1))
    return ELEMENT_BYTES[run.train.precision] * max(local.numel(*state.live, *state.history) for state in states)


def prefill_memory(run: RunConfig, reading: Reading, device: str = "cuda") -> list[PrefillMemory]:
    """Of each stage. device: its type, by which tiles are cut.

    Raises UserError where the residual settings or the layout cannot work at the model's shape.
    """
    layout, model = layout_of(run), run.model
    element, local = ELEMENT_BYTES[run.train.precision], local_of(run, reading)
    pieces = -(-reading.tokens // reading.chunk)
    cached = cache_peaks(run, local, pieces)
    page = reading.page or reading.tokens
    full_pages = -(-reading.tokens // page)
    room = min(full_pages * page, reading.tokens)
    per_token = 2 * reading.batch * model.kv_heads * model.head_size // run.parallel.tensor
    found = []
    for stage in range(layout.num_stages):
        spans = [layout.span(chunk) for chunk in layout.chunks_of(stage)]
        blocks = sum(last - first for first, last in spans)
        found.append(
            PrefillMemory(
                stage=stage,
                weights=element * sum(rank_weights(run, *span).total for span in spans),
                kv_cache=element * blocks * room * per_token,
                depth_state=max(depth_state_bytes(run, reading, *span) for span in spans),
                history_cache=cached[stage],
                workspace=_with_message(
                    max(_workspace(run, reading, device, *span) for span in spans),
                    _message(run, local, stage),
                    again=pieces * len(spans) > 1,
                ),
            )
        )
    return found


def _with_message(workspace: int, message: int, *, again: bool) -> int:
    """A message is packed when its chunk's work is done; `again`: the next work begins while it is on its way."""
    return workspace + message if again else max(workspace, message)


def _message(run: RunConfig, local: Local, stage: int) -> int:
    """The largest that a stage sends."""
    layout = layout_of(run)
    between = edges(residual_of(run), layout, run.pipeline.history_cache)
    sent = [local.numel(*edge.tensors) for edge in between if edge.sender % layout.num_stages == stage]
    return ELEMENT_BYTES[run.train.precision] * max(sent, default=0)


def _workspace(run: RunConfig, reading: Reading, device: str, first: int, last: int) -> int:
    model, ranks, local = run.model, run.parallel.tensor, local_of(run, reading)
    residual, element = residual_of(run), ELEMENT_BYTES[run.train.precision]
    wide = max(4, element)
    tokens = local.sequence * local.microbatch
    own = tokens // ranks if local.sequence_parallel else tokens
    width, head = model.hidden_size, model.head_size
    heads, kv_heads = model.num_attention_heads // ranks * head, model.kv_heads // ranks * head
    inner = model.ffn_hidden_size // ranks
    readers = 2 * last if last == model.num_layers else 2 * last - 1
    mixture, ahead = wide * own * width, residual.kept_ahead(2 * first, readers, reading.most_ahead)

    hidden = element * own * width
    gathered = element * tokens * width if local.sequence_parallel else 0
    matmul, rotated = element * tokens * (heads + 2 * kv_heads), element * tokens * (heads + kv_heads)
    values, out = element * tokens * kv_heads, tokens * heads
    spread = 2 * element * out if kv_heads < heads else 0
    merging = 2 * element * out + (wide * out if element < wide else 0)
    if reading.chunk >= reading.tokens:
        merging = element * out
    attention = max(gathered + matmul, matmul + values + rotated + max(element * out + spread, merging))
    attention = max(attention, matmul + rotated + element * (2 * out + tokens * width))
    mlp = max(gathered + 2 * element * tokens * inner, 4 * element * tokens * inner)
    mlp = max(mlp, element * tokens * (3 * inner + width))
    live = [local.numel(*residual.state_at(k).live) for k in range(2 * first, 2 * last + 1)]
    branch = element * max(live[::2]) + hidden + max(attention, mlp, (element + wide) * max(live))
    sources = max(len(residual.state_at(2 * k).history) for k in range(first, last + 1))
    tile = min(TILE_BYTES[device], mixture * sources)
    tiles = tile + tile * ahead // sources if ahead else 2 * mixture
    # a read takes its own mixture with it
    return max(mixture * max(ahead - 1, 0) + branch, mixture * ahead + tiles)
