"""What crosses each edge, and what each stage keeps, against a simulation of who holds which tensor when."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pytest

from depthbench.pipeline.edges import Edge, Local, Retention, edges, retentions
from depthbench.pipeline.layout import Layout, balanced, layout
from depthbench.residual import Residual, Shape, architecture
from depthbench.residual.state import Placement, StateSpec, TensorSpec
from tests.models import small_run
from tests.residual.walk import SHIPPED, shipped

ARCHITECTURES = [*SHIPPED, *(f"attnres_{b}" for b in (2, 3, 5, 7)), *(f"window_{size}" for size in (1, 5, 12))]
"""full_attnres has blocks of one sublayer; attnres_b here blocks of b; for window_n see `Window`."""


@dataclass(frozen=True)
class Window:
    """Only the description of an architecture, one that drops history all along: each sublayer leaves a tensor that
    the next `size` sublayers read. The readout reads none."""

    size: int
    num_layers: int

    def state_at(self, sublayer: int) -> StateSpec:
        left = range(max(0, sublayer - self.size), sublayer if sublayer < 2 * self.num_layers else 0)
        return StateSpec((TensorSpec("h", (8,)),), tuple(TensorSpec(f"left.{k}", (2,)) for k in left))


def shape_of(num_layers: int) -> Shape:
    return Shape(num_layers, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2)


@cache
def typed(kind: str, **settings: int) -> Any:
    return small_run(kind, settings).residual


@cache
def settings_of(name: str) -> tuple[str, dict[str, Any]]:
    return shipped(name)


def block_attnres(b: int, num_layers: int) -> Residual:
    return architecture("block_attnres")(typed("block_attnres", sublayers_per_block=b), shape_of(num_layers))


def build(name: str, num_layers: int) -> Residual:
    if name.startswith("attnres_"):
        return block_attnres(int(name.removeprefix("attnres_")), num_layers)
    if name.startswith("window_"):
        return cast(Residual, Window(int(name.removeprefix("window_")), num_layers))
    kind, settings = settings_of(name)
    if "num_blocks" in settings:  # a block has a sublayer at least
        settings = {**settings, "num_blocks": min(settings["num_blocks"], 2 * num_layers)}
    return architecture(kind)(typed(kind, **settings), shape_of(num_layers))


def layouts() -> Iterator[tuple[int, Layout]]:
    """(blocks, layout): even ones, balanced ones and three random ones of each number of stages and chunks."""
    draw = random.Random(1)
    for stages in (2, 3, 4):
        for virtual in (1, 2, 3):
            chunks = stages * virtual
            yield 2 * chunks, layout(2 * chunks, stages, virtual)
            yield chunks, layout(chunks, stages, virtual)
            yield 2 * chunks - 1, layout(2 * chunks - 1, stages, virtual, balanced(2 * chunks - 1, chunks))
            for _ in range(3):
                blocks = [draw.randint(1, 4) for _ in range(chunks)]
                yield sum(blocks), layout(sum(blocks), stages, virtual, blocks)


LAYOUTS = list(layouts())


def specs_before(residual: Residual, where: Layout, chunk: int) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Live and history tensors at a chunk's start; of the chunk after the last one: at the readout."""
    state = residual.state_at(2 * where.starts[chunk])
    return list(state.live), list(state.history)


def names(specs: list[TensorSpec] | tuple[TensorSpec, ...]) -> list[str]:
    return [spec.name for spec in specs]


@dataclass
class Visit:
    """lacks: what the chunk reads and its rank does not hold, in depth order. has: what it reads and its rank holds.
    kept_after: what the rank must keep once the chunk has run."""

    lacks: list[str]
    has: list[str]
    kept_after: set[str]


def simulate(residual: Residual, where: Layout) -> list[Visit]:
    """Each rank's holdings as one microbatch runs through the chunks in depth order."""
    num_chunks = len(where.starts) - 1
    reads = [names(specs_before(residual, where, chunk)[1]) for chunk in range(num_chunks + 1)]
    ranks: list[set[str]] = [set() for _ in range(where.num_stages)]
    ranks[0] |= set(reads[0])  # the embedding is made there, from tokens
    visits = []
    for chunk in range(num_chunks):
        holds = ranks[chunk % where.num_stages]
        lacks = [n for n in reads[chunk] if n not in holds]
        has = [n for n in reads[chunk] if n in holds and chunk > 0]
        # after the chunk, its rank also holds whatever the chunk was sent and has made
        holds |= {*reads[chunk], *reads[chunk + 1]}
        mine = [c for c in range(num_chunks) if c % where.num_stages == chunk % where.num_stages and c > chunk]
        kept = {n for n in holds if any(n in reads[c] for c in mine)}
        visits.append(Visit(lacks, has, kept))
    return visits


@dataclass
class Case:
    """named: for messages. between, kept: with the cache."""

    named: str
    residual: Residual
    where: Layout
    visits: list[Visit]
    between: list[Edge]
    kept: list[Retention]


@cache
def cases(name: str) -> list[Case]:
    found = []
    for num_layers, where in LAYOUTS:
        if name.startswith("attnres_") and int(name.removeprefix("attnres_")) > 2 * num_layers:
            continue
        residual = build(name, num_layers)
        between, kept = edges(residual, where, cache=True), retentions(residual, where, cache=True)
        found.append(Case(f"{name} over {where}", residual, where, simulate(residual, where), between, kept))
    return found


each_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


@each_architecture
def test_an_edge_carries_exactly_what_the_receiving_rank_lacks(name: str) -> None:
    """Neither more nor less, in depth order, with shapes; live tensors always."""
    assert len(cases(name)) > 40
    for case in cases(name):
        chunks = range(1, len(case.visits))
        assert [(edge.sender, edge.receiver) for edge in case.between] == [(c - 1, c) for c in chunks], case.named
        for edge in case.between:
            live, history = specs_before(case.residual, case.where, edge.receiver)
            lacks = case.visits[edge.receiver].lacks
            assert names(edge.history) == lacks, f"{case.named}, edge into {edge.receiver}"
            assert list(edge.history) == [spec for spec in history if spec.name in lacks], case.named
            assert list(edge.live) == live and list(edge.whole) == history, case.named
            assert edge.tensors == edge.live + edge.history
            assert edge.tensors, f"{case.named}: a message needs a tensor to have a dtype"


@each_architecture
def test_what_a_chunk_reads_arrives_or_is_taken_from_the_cache(name: str) -> None:
    """Each name in one of the two ways, and those that the rank holds never by message."""
    for case in cases(name):
        assert case.kept[0].taken == (), case.named
        for edge in case.between:
            sent, taken = names(edge.history), case.kept[edge.receiver].taken
            assert not set(sent) & set(taken), case.named
            assert sorted([*sent, *taken]) == sorted(names(edge.whole)), case.named
            assert list(taken) == case.visits[edge.receiver].has, case.named


@each_architecture
def test_the_cache_holds_a_value_from_its_first_to_its_last_chunk_on_the_rank(name: str) -> None:
    """After every chunk, what the three sets leave in the cache is what the rank's later chunks read of what it has;
    so nothing is kept that nobody takes, and nothing is left at the end."""
    for case in cases(name):
        caches: list[set[str]] = [set() for _ in range(case.where.num_stages)]
        for chunk, (retention, visit) in enumerate(zip(case.kept, case.visits, strict=True)):
            cached = caches[chunk % case.where.num_stages]
            assert set(retention.taken) <= cached, f"{case.named}, chunk {chunk} takes what is not there"
            assert retention.last <= set(retention.taken), f"{case.named}, chunk {chunk}"
            cached -= retention.last
            assert not retention.kept & cached, f"{case.named}, chunk {chunk} keeps what is there already"
            cached |= retention.kept
            assert cached == visit.kept_after, f"{case.named}, after chunk {chunk}"
        assert not any(caches), case.named


@each_architecture
def test_what_a_chunk_makes_and_keeps_leaves_with_its_message(name: str) -> None:
    """The boundary catches it as it is packed."""
    for case in cases(name):
        for chunk, retention in enumerate(case.kept):
            arrived = names(case.between[chunk - 1].history) if chunk else []
            made = retention.kept - set(arrived)
            if made:
                assert made <= set(names(case.between[chunk].history)), f"{case.named}, chunk {chunk}"


@each_architecture
def test_without_a_cache_everything_is_sent_and_nothing_kept(name: str) -> None:
    """Each edge then carries all that the receiving chunk reads."""
    for case in cases(name):
        for edge in edges(case.residual, case.where, cache=False):
            live, history = specs_before(case.residual, case.where, edge.receiver)
            assert (list(edge.live), list(edge.history)) == (live, history), case.named
        for retention in retentions(case.residual, case.where, cache=False):
            assert not retention.taken and not retention.last and not retention.kept, case.named


@each_architecture
def test_one_chunk_a_stage_keeps_nothing(name: str) -> None:
    """No rank runs twice, so the cache changes nothing."""
    for case in cases(name):
        if case.where.num_chunks == case.where.num_stages:
            assert not any(retention.kept or retention.taken for retention in case.kept), case.named
            assert edges(case.residual, case.where, cache=False) == case.between, case.named


@each_architecture
def test_the_papers_scheme_sends_what_was_not_received_before(name: str) -> None:
    """It counts what a rank was sent, not what it made: never less than ours, and never more than everything."""
    for case in cases(name):
        received: list[set[str]] = [set() for _ in range(case.where.num_stages)]
        received[0] |= set(names(specs_before(case.residual, case.where, 0)[1]))
        for edge in case.between:
            rank = received[edge.receiver % case.where.num_stages]
            assert names(edge.paper) == [n for n in names(edge.whole) if n not in rank], case.named
            rank |= set(names(edge.whole))
            assert set(edge.history) <= set(edge.paper) <= set(edge.whole), case.named


def test_the_history_that_is_dropped_near_the_end_is_neither_sent_nor_kept() -> None:
    """MoDA's last block is the last reader of its slots: the state after it has none, and the last chunks keep none."""
    residual, where = build("moda", 8), layout(8, 4, 2)
    between, kept = edges(residual, where, cache=True), retentions(residual, where, cache=True)
    assert [len(edge.whole) for edge in between] == [4, 8, 12, 16, 20, 24, 28]  # keys and values of two slots a block
    assert [len(edge.history) for edge in between] == [4, 8, 12, 12, 12, 12, 12]
    assert [len(retention.kept) for retention in kept] == [4, 8, 12, 16, 0, 0, 0, 0]
    assert not residual.state_at(16).history


# -- figures of the AttnRes paper -------------------------------------------------------------------------------------
def counts(residual: Residual, where: Layout, cache: bool) -> list[int]:
    return [len(edge.history) for edge in edges(residual, where, cache)]


def test_the_papers_figure() -> None:
    """Four stages of two chunks, two chunks a block: 11 tensors a microbatch, 19 without the cache, 13 in the paper."""
    residual, where = block_attnres(4, 8), layout(8, 4, 2)
    assert counts(residual, where, cache=True) == [1, 2, 2, 2, 1, 2, 1]
    assert counts(residual, where, cache=False) == [1, 2, 2, 3, 3, 4, 4]
    for cached in (True, False):
        assert [len(edge.paper) for edge in edges(residual, where, cached)] == [1, 2, 2, 2, 2, 2, 2]


def test_full_attnres_over_eight_chunks() -> None:
    """Sixteen sublayers at P = 4, V = 2: 39 tensors a microbatch, 63 without the cache."""
    residual, where = block_attnres(1, 8), layout(8, 4, 2)
    assert sum(counts(residual, where, cache=True)) == 39
    assert sum(counts(residual, where, cache=False)) == 63


@pytest.mark.parametrize("per_chunk", [1, 2, 4])
@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_at_most_what_the_papers_formula_says(stages: int, virtual: int, per_chunk: int) -> None:
    """Where every chunk completes N_p blocks: P(P-1)/2 N_p + (V-1) P^2 N_p tensors, which leaves out the embedding
    that each edge of the first round carries too. The naive sum is C(C-1)/2 N_p and the embedding on every edge."""
    chunks = stages * virtual
    residual, where = block_attnres(4 // per_chunk, 2 * chunks), layout(2 * chunks, stages, virtual)
    formula = stages * (stages - 1) // 2 * per_chunk + (virtual - 1) * stages**2 * per_chunk
    embedding = stages - 1
    ours = sum(counts(residual, where, cache=True))
    assert ours <= formula + embedding
    assert ours == formula + embedding - (virtual - 1) * stages * per_chunk
    assert sum(len(edge.paper) for edge in edges(residual, where, True)) == formula + embedding
    assert sum(counts(residual, where, cache=False)) == chunks * (chunks - 1) // 2 * per_chunk + chunks - 1


@pytest.mark.parametrize("b", [3, 8, 12])
@pytest.mark.parametrize(
    ("stages", "virtual"), [(2, 2), (2, 3), (2, 4), (3, 1), (3, 4), (4, 1), (4, 3), (8, 1), (8, 4)]
)
def test_at_most_what_the_papers_formula_says_where_blocks_span_chunks(stages: int, virtual: int, b: int) -> None:
    """Chunks of four sublayers: how many blocks each of them completes differs, and N_p is their mean."""
    chunks = stages * virtual
    residual, where = block_attnres(b, 2 * chunks), layout(2 * chunks, stages, virtual)
    formula = (stages * (stages - 1) / 2 + (virtual - 1) * stages**2) * 4 / b
    assert sum(counts(residual, where, cache=True)) <= formula + stages - 1  # and the embedding


# -- sizes ------------------------------------------------------------------------------------------------------------
def only(residual: Residual, where: Layout) -> Edge:
    (edge,) = edges(residual, where, cache=True)
    return edge


@pytest.mark.parametrize("name", ["hc", "mhc"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_an_edge_of_streams_is_as_wide_as_their_number(name: str, streams: int) -> None:
    """n h wide, where a plain architecture's is h."""
    residual = architecture(name)(typed(name, num_streams=streams), shape_of(4))
    edge = only(residual, layout(4, 2, 1))
    local = Local(sequence=16, microbatch=3, tensor_parallel=1, sequence_parallel=False)
    assert local.numel(*edge.tensors) == 16 * 3 * streams * 8
    plain = only(build("pre_ln", 4), layout(4, 2, 1))
    assert local.numel(*plain.tensors) == 16 * 3 * 8


@pytest.mark.parametrize(
    ("tensor_parallel", "sequence_parallel", "tokens", "heads"),
    [(1, False, 16, 4), (2, False, 16, 2), (4, False, 16, 1), (2, True, 8, 2), (4, True, 4, 1)],
)
def test_a_ranks_share(tensor_parallel: int, sequence_parallel: bool, tokens: int, heads: int) -> None:
    """Activations are divided along the sequence iff sequence parallelism is on; depth keys and values by head, with
    all tokens, always."""
    local = Local(16, 3, tensor_parallel, sequence_parallel)
    hidden, streams = TensorSpec("h", (8,)), TensorSpec("streams", (5, 8))
    keys = TensorSpec("key.0", (4, 6), Placement.KV_HEADS)
    assert local.shape(hidden) == (tokens, 3, 8)
    assert local.shape(streams) == (tokens, 3, 5, 8)
    assert local.shape(keys) == (16, 3, heads, 6)
    assert local.numel() == 0
    assert local.numel(hidden, keys, streams) == tokens * 3 * 8 + 16 * 3 * heads * 6 + tokens * 3 * 40


def test_a_moda_edge_is_its_hidden_state_and_a_key_and_a_value_a_slot() -> None:
    """Two ranks that divide the sequence: half the tokens of h, half the heads of each slot."""
    edge = only(build("moda", 4), layout(4, 2, 1))
    assert names(edge.tensors) == ["h", *(f"{kind}.{slot}" for slot in range(4) for kind in ("key", "value"))]
    assert Local(16, 3, 2, True).numel(*edge.tensors) == 8 * 3 * 8 + 8 * (16 * 3 * 1 * 2)
