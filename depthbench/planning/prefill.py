"""What a rank holds at the most while a model reads a text in chunks: weights, keys and values, the depth state where
it is fullest (a source of AttnRes is D elements of each of a rank's own tokens), what a pipeline's stages cache, and a
workspace (`prefill_workspace.py`), with a message on its way. No part grows with the length of the text but the keys
and values; and in float32 and float64 on CUDA, whose kernel takes neither, scores by a page, which a short one bounds.
"""

from dataclasses import dataclass
from typing import Any

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, residual_of
from depthbench.model.cached_attention import head_padding
from depthbench.pipeline.edges import Local, edges

from .parameters import rank_weights
from .pipeline import ELEMENT_BYTES, cache_peaks
from .prefill_workspace import Workspace


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
    some of the same tensors, which a plan's peak then counts twice."""

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
    """Of each stage. device: its type, by which tiles are cut and attention's kernel is chosen.

    Raises UserError where the residual settings or the layout cannot work at the model's shape.
    """
    layout, model = layout_of(run), run.model
    element, local = ELEMENT_BYTES[run.train.precision], local_of(run, reading)
    pieces = -(-reading.tokens // reading.chunk)
    cached = cache_peaks(run, local, pieces)
    page = reading.page or reading.tokens
    full_pages = -(-reading.tokens // page)
    room = min(full_pages * page, reading.tokens)
    kept_size = model.head_size + head_padding(model.head_size, element, device)
    per_token = 2 * reading.batch * model.kv_heads * kept_size // run.parallel.tensor
    work = Workspace(run, local, reading.most_ahead, _pairs(reading, page), device)
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
                    max(work.beyond_state(*span) for span in spans),
                    _message(run, local, stage),
                    again=pieces * len(spans) > 1,
                ),
            )
        )
    return found


def _pairs(reading: Reading, page: int) -> int:
    """The most that a piece's tokens and the earlier ones on one page make, of one sequence."""
    starts = range(reading.chunk, reading.tokens, reading.chunk)
    return max((min(reading.chunk, reading.tokens - start) * min(page, start) for start in starts), default=0)


def _with_message(workspace: int, message: int, *, again: bool) -> int:
    """A message is packed when its chunk's work is done; `again`: the next work begins while it is on its way."""
    return workspace + message if again else max(workspace, message)


def _message(run: RunConfig, local: Local, stage: int) -> int:
    """The largest that a stage sends."""
    layout = layout_of(run)
    between = edges(residual_of(run), layout, run.pipeline.history_cache)
    sent = [local.numel(*edge.tensors) for edge in between if edge.sender % layout.num_stages == stage]
    return ELEMENT_BYTES[run.train.precision] * max(sent, default=0)
