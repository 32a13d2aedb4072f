"""A model cut into chunks, with messages handed over by hand, computes what it does in one piece.

Real residual modules around simple branches, in one process. A message is copied on its way, as a network does; then
the sent one is filled with NaN and freed, as Megatron-Core's schedules free outputs, so that whatever still looks at
it shows.

Shapes: S tokens, B microbatch, D hidden, H key/value heads of size K.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import custom_backward
from torch import Tensor, nn

from depthbench.pipeline.boundary import Boundary, boundaries
from depthbench.pipeline.cache import HistoryCache
from depthbench.pipeline.edges import Local, Shares
from depthbench.pipeline.layout import Layout, layout
from depthbench.pipeline.message import header_elements
from depthbench.residual import Residual, Shape, architecture
from depthbench.residual.state import DepthState
from tests.models import small_run
from tests.residual.walk import SHIPPED, shipped

S, B, D, H, K = 3, 2, 8, 2, 2
LOCAL = Local(S, B, tensor_parallel=1, sequence_parallel=False)
MICROBATCHES = (0, 1)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: shipped(name) for name in SHIPPED},
    **{f"attnres_{b}": ("block_attnres", {"sublayers_per_block": b}) for b in (3, 5)},
    "post_norm_moda": ("moda", {"norm": "post"}),
}
LAYOUTS = {
    "P2": layout(4, 2, 1),
    "P2 V2": layout(5, 2, 2, [2, 1, 1, 1]),
    "P2 V3": layout(6, 2, 3),
    "P3 V2": layout(8, 3, 2, [1, 2, 1, 2, 1, 1]),
    "P4 V2": layout(8, 4, 2),
    "P2 V4, uneven": layout(12, 2, 4, [1, 3, 1, 1, 2, 1, 2, 1]),
}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Sublayers(nn.Module):
    """The residual modules of a whole model with branches, for float64; sublayer 2i is an attention."""

    def __init__(self, residual: Residual) -> None:
        super().__init__()
        shape = residual.shape
        total = shape.num_sublayers
        self.residual = residual
        self.connections = nn.ModuleList(residual.connection(k, torch.float64) for k in range(total))
        self.readout = residual.readout(torch.float64)
        self.weights = nn.ParameterDict()
        for k in range(total):
            rows = {"out": D, "depth": D, "keys": H * K, "values": H * K}
            if k % 2:
                rows = {"out": D, **{extra.name: extra.rows for extra in residual.extra_projections(k // 2)}}
            for name, count in rows.items():
                inner = H * K if name == "depth" else D
                self.weights[f"{name}_{k}"] = nn.Parameter(normal(1, inner, count) / D**0.5)
        self.weights["embedding"] = nn.Parameter(torch.ones(D, dtype=torch.float64))
        for seed, parameter in enumerate(self.parameters()):
            spec = getattr(parameter, "spec", None)
            if spec:  # of a residual connection: its own initial values, disturbed
                parameter.data = spec.parts[0].init(tuple(parameter.shape), torch.Generator().manual_seed(0)).double()
            parameter.data = parameter.data + 0.1 * normal(seed, *parameter.shape)

    def start(self, microbatch: int) -> DepthState:
        return self.residual.start(normal(100 + microbatch, S, B, D) * self.weights["embedding"])

    def run(self, k: int, state: DepthState) -> DepthState:
        connection: Any = self.connections[k]
        read = connection(state)
        y = torch.tanh(read.hidden @ self.weights[f"out_{k}"])
        if k % 2:
            extras = self.residual.extra_projections(k // 2)
            taps = {extra.name: read.hidden @ self.weights[f"{extra.name}_{k}"] for extra in extras}
            written: DepthState = connection.write(state, read, y, taps)
            return written
        if read.depth_kv:
            for slot, (key, value) in enumerate(zip(*read.depth_kv, strict=True)):
                y = y + (torch.tanh(key + slot) * value).flatten(2) @ self.weights[f"depth_{k}"]
        taps = {name: (read.hidden @ self.weights[f"{name}_{k}"]).unflatten(-1, (H, K)) for name in ("keys", "values")}
        written = connection.write(state, read, y, taps)
        return written

    def loss(self, state: DepthState, microbatch: int) -> Tensor:
        hidden: Tensor = self.readout(state)
        return (hidden * normal(200 + microbatch, S, B, D)).sum()

    def gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.zero_grad()
        return found


def build(name: str, where: Layout) -> Sublayers:
    kind, settings = ARCHITECTURES[name]
    shape = Shape(where.starts[-1], D, num_heads=4, num_kv_heads=H, head_dim=K)
    return Sublayers(architecture(kind)(small_run(kind, settings).residual, shape))


@cache
def uncut(name: str, where: Layout) -> tuple[list[float], dict[str, Tensor]]:
    """Naively: the loss of each microbatch and all gradients."""
    model, losses = build(name, where), []
    for microbatch in MICROBATCHES:
        state = model.start(microbatch)
        for k in range(model.residual.shape.num_sublayers):
            state = model.run(k, state)
        loss = model.loss(state, microbatch)
        loss.backward()
        losses.append(loss.item())
    return losses, model.gradients()


def carried(packed: Tensor) -> Tensor:
    """A message at its other end. The header is the communicator's: no chunk may look at it."""
    arrived = packed.detach().clone()
    arrived[: header_elements(packed.dtype)] = torch.nan
    return arrived


class Pipeline:
    """A model's chunks; a stage's share its cache. deallocate: as Megatron-Core's deallocate_pipeline_outputs."""

    def __init__(self, name: str, where: Layout, *, history_cache: bool = True, deallocate: bool = True) -> None:
        self.model, self.where, self.deallocate = build(name, where), where, deallocate
        self.caches = [HistoryCache() for _ in range(where.num_stages)]
        self.bounds: dict[int, Boundary] = {}
        for stage, one in enumerate(self.caches):
            found = boundaries(self.model.residual, where, stage, Shares(LOCAL), history_cache, one)
            self.bounds |= dict(zip(where.chunks_of(stage), found, strict=True))
        for chunk in range(where.num_chunks):
            readers: dict[int, nn.Module] = {k: self.model.connections[k] for k in self.sublayers(chunk)}
            if chunk == where.num_chunks - 1:
                readers[where.sublayer(where.num_chunks)] = self.model.readout
            self.model.residual.share(readers)
        self.received: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.losses: dict[int, float] = {}

    def sublayers(self, chunk: int) -> range:
        return range(2 * self.where.starts[chunk], 2 * self.where.starts[chunk + 1])

    def enter(self, chunk: int, microbatch: int) -> DepthState:
        if chunk == 0:
            return self.model.start(microbatch)
        state = self.bounds[chunk].arrive(self.received[chunk, microbatch], microbatch)
        spec = self.model.residual.state_at(self.sublayers(chunk).start)
        assert {n: tuple(t.shape) for n, t in state.live.items()} == {s.name: (S, B, *s.shape) for s in spec.live}
        assert list(state.history) == [s.name for s in spec.history], "history comes in depth order"
        assert all(state.history[s.name].shape == (S, B, *s.shape) for s in spec.history)
        return state

    def forward(self, chunk: int, microbatch: int) -> None:
        state = self.enter(chunk, microbatch)
        for k in self.sublayers(chunk):
            state = self.model.run(k, state)
        if chunk == self.where.num_chunks - 1:
            out = self.model.loss(state, microbatch)
            self.losses[microbatch] = out.item()
        else:
            out = self.bounds[chunk].depart(state, microbatch)
            self.received[chunk + 1, microbatch] = carried(out).requires_grad_(torch.is_grad_enabled())
            if self.deallocate:
                out.data.fill_(torch.nan)
                out.data = torch.empty(1, dtype=out.dtype)
        if torch.is_grad_enabled():
            self.outputs[chunk, microbatch] = out

    def backward(self, chunk: int, microbatch: int) -> None:
        out, grad = self.outputs.pop((chunk, microbatch)), None
        if chunk < self.where.num_chunks - 1:
            sent = self.received.pop((chunk + 1, microbatch)).grad
            assert sent is not None
            grad = carried(sent)
            sent.fill_(torch.nan)
        if self.deallocate:
            custom_backward(out, grad)
        else:
            out.backward(grad)

    def check(self, name: str) -> None:
        losses, gradients = uncut(name, self.where)
        assert [self.losses[m] for m in MICROBATCHES] == pytest.approx(losses, rel=1e-12)
        found = self.model.gradients()
        assert set(found) == set(gradients)
        largest = max(grad.abs().max().item() for grad in gradients.values())
        for parameter, expected in gradients.items():
            scale = max(expected.abs().max().item(), 1e-3 * largest)
            error = (found[parameter] - expected).abs().max().item()
            assert error <= 1e-12 * scale, f"{parameter}: relative error {error / scale:.1e}"
        for one in self.caches:
            one.assert_empty()
            assert one.bytes == 0


Step = tuple[str, int, int]


def together(chunks: int) -> Iterator[Step]:
    """Each chunk runs both microbatches before the next one does."""
    yield from (("forward", chunk, m) for chunk in range(chunks) for m in MICROBATCHES)
    yield from (("backward", chunk, m) for chunk in reversed(range(chunks)) for m in MICROBATCHES)


def staggered(chunks: int) -> Iterator[Step]:
    """The first microbatch goes back while the second has come half the way."""
    half = chunks // 2
    yield from (("forward", chunk, 0) for chunk in range(chunks))
    yield from (("forward", chunk, 1) for chunk in range(half))
    yield from (("backward", chunk, 0) for chunk in reversed(range(chunks)))
    yield from (("forward", chunk, 1) for chunk in range(half, chunks))
    yield from (("backward", chunk, 1) for chunk in reversed(range(chunks)))


def run(pipeline: Pipeline, steps: Iterator[Step]) -> None:
    for kind, chunk, microbatch in steps:
        getattr(pipeline, kind)(chunk, microbatch)


def cases() -> Iterator[tuple[str, str]]:
    """Architectures with a history in every layout, the others in one."""
    for name in ARCHITECTURES:
        has_history = bool(build(name, LAYOUTS["P3 V2"]).residual.state_at(2).history)
        yield from ((name, where) for where in (LAYOUTS if has_history else ["P3 V2"]))


@pytest.mark.parametrize(("name", "named"), cases())
def test_a_cut_model_has_the_losses_and_gradients_of_the_whole_one(name: str, named: str) -> None:
    """Two microbatches in flight, to 1e-12; sent messages are gone when backward comes, and caches empty after it."""
    where = LAYOUTS[named]
    for schedule in (together, staggered):
        pipeline = Pipeline(name, where)
        run(pipeline, schedule(where.num_chunks))
        pipeline.check(name)


@pytest.mark.parametrize("name", ["full_attnres", "attnres_3", "moda", "hc"])
def test_so_it_has_without_the_cache(name: str) -> None:
    """Everything is sent again, nothing kept."""
    for where in (LAYOUTS["P3 V2"], LAYOUTS["P4 V2"]):
        pipeline = Pipeline(name, where, history_cache=False)
        run(pipeline, staggered(where.num_chunks))
        pipeline.check(name)
        assert not any(one.peak_bytes for one in pipeline.caches)


@pytest.mark.parametrize("name", ["full_attnres", "attnres_3", "moda", "hc"])
def test_so_it_has_where_outputs_are_not_freed(name: str) -> None:
    """Through autograd's own backward."""
    pipeline = Pipeline(name, LAYOUTS["P2 V4, uneven"], deallocate=False)
    run(pipeline, staggered(8))
    pipeline.check(name)


@pytest.mark.parametrize("name", ["full_attnres", "attnres_3", "moda", "mhc"])
def test_an_evaluation_leaves_nothing_behind(name: str) -> None:
    """Forward alone, without gradients: the same losses, and no value or sum is left."""
    where = LAYOUTS["P3 V2"]
    pipeline = Pipeline(name, where)
    with torch.no_grad():
        run(pipeline, (step for step in together(where.num_chunks) if step[0] == "forward"))
    losses, _ = uncut(name, where)
    assert [pipeline.losses[m] for m in MICROBATCHES] == pytest.approx(losses, rel=1e-12)
    for one in pipeline.caches:
        one.assert_empty()


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_what_is_cached_is_no_part_of_a_message_that_was_sent() -> None:
    """Of one that was received it may be: that one stays."""
    where = LAYOUTS["P3 V2"]
    pipeline = Pipeline("full_attnres", where, deallocate=False)
    run(pipeline, (step for step in together(where.num_chunks - 1) if step[0] == "forward"))
    sent = {storage(out) for out in pipeline.outputs.values()}
    cached = [value for one in pipeline.caches for value in one.values.values()]
    assert cached and not sent & {storage(value) for value in cached}
    assert all(not value.requires_grad for value in cached)


def test_what_a_chunk_gets_from_the_cache_it_does_not_send_back() -> None:
    """The backward message has the gradients of what came forward, and no more; the others' go by the cache."""
    where = LAYOUTS["P4 V2"]
    pipeline = Pipeline("full_attnres", where)
    run(pipeline, (step for step in together(where.num_chunks) if step[0] == "forward"))
    for chunk in range(where.num_chunks - 1, 3, -1):
        for microbatch in MICROBATCHES:
            pipeline.backward(chunk, microbatch)
            grad = pipeline.received[chunk, microbatch].grad
            assert grad is not None and grad.shape == pipeline.received[chunk, microbatch].shape
        taken = {(m, name) for m in MICROBATCHES for name in pipeline.bounds[chunk].kept.taken}
        assert taken and set(pipeline.caches[chunk % 4].pending) == taken


def test_a_stages_boundaries_are_its_chunks() -> None:
    """The model's ends have one edge only."""
    where = LAYOUTS["P3 V2"]
    residual = build("full_attnres", where).residual
    for stage in range(3):
        one = HistoryCache()
        for bound, chunk in zip(
            boundaries(residual, where, stage, Shares(LOCAL), True, one), (stage, stage + 3), strict=True
        ):
            assert bound.chunk == chunk and bound.cache is one
            arriving = (bound.arriving.sender, bound.arriving.receiver) if bound.arriving else None
            departing = (bound.departing.sender, bound.departing.receiver) if bound.departing else None
            assert arriving == ((chunk - 1, chunk) if chunk > 0 else None)
            assert departing == ((chunk, chunk + 1) if chunk < 5 else None)
