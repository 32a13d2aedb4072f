"""What a recorded step says of itself, and that it is the step that it would have been."""

import gc
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel import schedules

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, local_share, microbatch_group, residual_of
from depthbench.pipeline.communicator import Handle
from depthbench.pipeline.edges import retentions
from depthbench.pipeline.ledger import Traffic
from depthbench.pipeline.order import runs
from depthbench.planning.pipeline import cached_bytes, edge_plans
from depthbench.planning.schedule import Compute, Wait, schedule
from depthbench.profiling.clocks import CpuClock
from depthbench.profiling.events import Kind, Span
from depthbench.profiling.recorder import Places, Recorder
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from tests.harness import run_workers
from tests.models import Pieces, model_pieces, small_run, start_model
from tests.parallel.test_layouts import microbatches
from tests.planning.test_schedule import WAITS_AS_WRITTEN

MICROBATCHES, ELEMENT, STEP = 4, 4, 7
SHIFT = 1e6  # microseconds that the recording adds to each time

Triple = tuple[int, int, bool]
"""chunk, microbatch, backward"""

KINDS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "single": (1, {}, {}),
    "pp2": (2, {"pipeline": 2}, {}),
    "pp2_vp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "pp2_vp2_overlap": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"overlap_p2p": True}),
    "pp2_vp2_resent": (2, {"pipeline": 2, "virtual_pipeline": 2}, {"history_cache": False}),
    "pp2_vp2_full": (2, {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"}, {}),
}
PIPELINES = [kind for kind in KINDS if kind != "single"]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_pipeline = pytest.mark.parametrize("kind", PIPELINES)


def run_of(kind: str) -> RunConfig:
    _, parallel, pipeline = KINDS[kind]
    return small_run(
        "block_attnres",
        {"sublayers_per_block": 1},
        model={"num_layers": 8},
        train={"precision": "fp32", "micro_batch": 2, "global_batch": 2 * MICROBATCHES},
        parallel=parallel,
        pipeline=pipeline,
    )


@dataclass
class Found:
    """Of one rank. plain, recorded: loss and gradients of the step without and with the recorder. ran: chunks in the
    order in which their modules ran. left: what still stands in the place of an original, after a step and after one
    that an exception ended. handles: messages that are still alive though nobody collected garbage."""

    plain: tuple[float, Pieces]
    recorded: tuple[float, Pieces]
    spans: list[Span]
    ran: list[int]
    sent: dict[tuple[int, bool], Traffic]
    cache_hit_bytes: int
    cache_bytes: int
    left: list[str]
    left_after_exception: list[str]
    after_exception: tuple[float, Pieces]
    handles: int


def attributes(model: Any, optimizer: Any) -> dict[str, tuple[Any, str]]:
    """What a recorder replaces."""
    found: dict[str, tuple[Any, str]] = {
        "forward_step": (schedules, "forward_step"),
        "backward_step": (schedules, "backward_step"),
        "finalize": (model.context.megatron, "finalize_model_grads_func"),
        "prepare": (optimizer, "prepare"),
        "apply": (optimizer, "apply"),
    }
    if model.transport:
        found["communicator"] = (model.transport, "make_communicator")
        found["take"] = (model.transport.cache, "take")
    return found


def record(rank: int, world_size: int, store: str, run: RunConfig) -> Found:
    """The same step without a recorder, with one, with one that an exception ends, and without once more."""
    model = start_model(rank, world_size, store, run)
    optimizer = Optimizer(run, model)
    batches = microbatches(run, 0, 0, 1)
    places = Places(layout_of(run), rank, len(batches), microbatch_group(run))
    recorder = Recorder(places, model.transport, optimizer, model.context.megatron, CpuClock())
    replaced = attributes(model, optimizer)
    # a bound method is another object each time it is looked up, but equal to itself; ours in its place is not
    before = {name: (getattr(*place), place[1] in vars(place[0])) for name, place in replaced.items()}

    def left() -> list[str]:
        after = {name: (getattr(*place), place[1] in vars(place[0])) for name, place in replaced.items()}
        return [name for name in replaced if after[name] != before[name]]

    def step() -> tuple[float, Pieces]:
        optimizer.zero_grad()
        loss = run_microbatches(model, batches, forward_only=False)
        return loss.total, model_pieces(model, "main_grad")

    plain = step()
    ran: list[int] = []
    hooks = [
        stage.register_forward_pre_hook(lambda *_, chunk=virtual * world_size + rank: ran.append(chunk))
        for virtual, stage in enumerate(model.stages)
    ]
    gc.collect()
    gc.disable()
    with recorder.step(STEP):
        assert sorted(left()) == sorted(replaced)
        recorded = step()
        sent = dict(model.transport.ledger.sent) if model.transport else {}
        norm = optimizer.prepare()
        optimizer.apply(0.0, norm)
    for hook in hooks:
        hook.remove()
    restored, spans, hits = left(), recorder.spans(SHIFT), recorder.cache_hit_bytes
    handles = sum(isinstance(one, Handle) for one in gc.get_objects())
    gc.enable()
    with pytest.raises(ZeroDivisionError), recorder.step(STEP + 1):
        step()
        before_search = len(recorder.taken)
        run_microbatches(model, batches, forward_only=True)  # as the search for a loss that is not finite does
        kinds = {taken.kind for taken in recorder.taken[before_search:]}
        assert not kinds & {Kind.FORWARD, Kind.BACKWARD}
        raise ZeroDivisionError
    return Found(
        plain,
        recorded,
        spans,
        ran,
        sent,
        hits,
        recorder.cache_bytes,
        restored,
        left(),
        step(),
        handles,
    )


@cache
def found(kind: str) -> list[Found]:
    return run_workers(KINDS[kind][0], record, run_of(kind))


def of(spans: list[Span], *kinds: Kind) -> list[Span]:
    return sorted((span for span in spans if span.kind in kinds), key=lambda span: span.begin)


def place(span: Span) -> Triple:
    return span.chunk, span.microbatch, span.backward


def computing(spans: list[Span]) -> list[Span]:
    """Those of the computing thread, without the step itself."""
    return [span for span in of(spans, *Kind) if not span.kind.is_message and span.kind is not Kind.STEP]


@each_pipeline
def test_messages_are_let_go(kind: str) -> None:
    """With the buffers that they hold, once they are through."""
    assert [rank.handles for rank in found(kind)] == [0] * KINDS[kind][0]


@each_kind
def test_a_recorded_step_is_the_same_step(kind: str) -> None:
    """Loss and gradients bit by bit, also of a step after an exception in a recorded one."""
    for rank in found(kind):
        for loss, gradients in (rank.recorded, rank.after_exception):
            assert loss == rank.plain[0] and gradients.keys() == rank.plain[1].keys()
            for name, (_, _, values) in gradients.items():
                assert torch.equal(values, rank.plain[1][name][2]), name


@each_kind
def test_the_originals_are_back(kind: str) -> None:
    """After a step and after an exception."""
    for rank in found(kind):
        assert rank.left == rank.left_after_exception == []


@each_kind
def test_passes_are_where_the_schedule_has_them(kind: str) -> None:
    """Every microbatch through every chunk, in the order of the table and of the modules that really ran."""
    run, where = run_of(kind), layout_of(run_of(kind))
    planned = schedule(where, MICROBATCHES, microbatch_group(run), overlap_p2p=run.pipeline.overlap_p2p)
    for stage, rank in enumerate(found(kind)):
        for passing, backward in ((Kind.FORWARD, False), (Kind.BACKWARD, True)):
            spans = of(rank.spans, passing)
            listed = runs(where, stage, MICROBATCHES, microbatch_group(run), backward=backward)
            assert [place(span) for span in spans] == [(chunk, m, backward) for chunk, m in listed]
        assert [span.chunk for span in of(rank.spans, Kind.FORWARD)] == rank.ran
        both = [place(span) for span in of(rank.spans, Kind.FORWARD, Kind.BACKWARD)]
        scripted = [(a.chunk, a.microbatch, a.backward) for a in planned[stage] if isinstance(a, Compute)]
        assert both == scripted


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=WAITS_AS_WRITTEN if "overlap" in kind else []) for kind in PIPELINES]
)
def test_waits_are_where_the_schedule_has_them(kind: str) -> None:
    """Passes and waits in one order, as the plan's script of the schedule has them."""
    run = run_of(kind)
    planned = schedule(layout_of(run), MICROBATCHES, microbatch_group(run), overlap_p2p=run.pipeline.overlap_p2p)
    for stage, rank in enumerate(found(kind)):
        expected: list[tuple[str, Triple]] = []
        for action in planned[stage]:
            if isinstance(action, Compute):
                expected.append(("run", (action.chunk, action.microbatch, action.backward)))
            elif isinstance(action, Wait):
                label = action.label
                expected.append(("wait", (label.receiver, label.microbatch, label.backward)))
        waits = (Kind.WAIT_RECEIVE, Kind.WAIT_SEND)
        spans = of(rank.spans, Kind.FORWARD, Kind.BACKWARD, *waits)
        shown = [("wait" if span.kind in waits else "run", place(span)) for span in spans]
        finished = len(shown) - 2  # the last send of each direction is waited for in no particular order
        assert shown[:finished] == expected[:finished] and sorted(shown) == sorted(expected)


@each_kind
def test_what_a_rank_does_lies_one_after_the_other_in_its_step(kind: str) -> None:
    for rank in found(kind):
        (whole,) = of(rank.spans, Kind.STEP)
        assert whole.begin > SHIFT and all(span.step == STEP for span in rank.spans)
        assert all(whole.begin <= span.begin <= span.end <= whole.end for span in rank.spans)
        at = whole.begin
        for span in computing(rank.spans):
            assert span.begin >= at, f"{span} overlaps the one before"
            at = span.end
        kinds = [span.kind for span in computing(rank.spans)]
        assert kinds[-3:] == [Kind.REDUCE, Kind.OPTIMIZER, Kind.OPTIMIZER] and Kind.OPTIMIZER not in kinds[:-2]
        after_the_passes = kinds[kinds.index(Kind.REDUCE) : -2]
        assert set(after_the_passes) <= {Kind.REDUCE, Kind.WAIT_SEND}, "but for what finishes the last sends"


@each_pipeline
def test_every_message_sent_is_received_once(kind: str) -> None:
    """With as many bytes and tensors."""
    counts = {
        kind: Counter(
            (span.step, *place(span), span.bytes, span.tensors) for rank in ranks for span in of(rank.spans, kind)
        )
        for ranks in [found(kind)]
        for kind in (Kind.SEND, Kind.RECEIVE)
    }
    assert counts[Kind.SEND] == counts[Kind.RECEIVE]
    chunks = layout_of(run_of(kind)).num_chunks
    assert len(counts[Kind.SEND]) == 2 * (chunks - 1) * MICROBATCHES
    assert set(counts[Kind.SEND].values()) == {1}


@each_pipeline
def test_bytes_are_the_ledgers_and_the_plans(kind: str) -> None:
    """Of each edge and direction, all microbatches."""
    shown: Counter[tuple[int, bool]] = Counter()
    for rank in found(kind):
        mine: Counter[tuple[int, bool]] = Counter()
        for span in of(rank.spans, Kind.SEND):
            mine[span.chunk, span.backward] += span.bytes
        assert mine == {edge: traffic.bytes for edge, traffic in rank.sent.items()}
        shown += mine
    assert shown == {
        (max(edge.sender, edge.receiver), edge.direction == "backward"): MICROBATCHES * edge.bytes
        for edge in edge_plans(run_of(kind))
    }


@each_pipeline
def test_a_wait_lies_in_its_message(kind: str) -> None:
    """And begins no later than it ends; a received message is not through before it is waited for."""
    for rank in found(kind):
        for waiting, message in ((Kind.WAIT_SEND, Kind.SEND), (Kind.WAIT_RECEIVE, Kind.RECEIVE)):
            messages = {place(span): span for span in of(rank.spans, message)}
            waits = of(rank.spans, waiting)
            assert {place(wait) for wait in waits} == set(messages) and len(waits) == len(messages)
            for wait in waits:
                whole = messages[place(wait)]
                assert whole.begin <= wait.begin <= wait.end <= whole.end


@each_pipeline
def test_a_message_is_posted_before_it_arrives(kind: str) -> None:
    """On one machine all clocks are one, so nothing is received before it was sent."""
    spans = [span for rank in found(kind) for span in rank.spans]
    sent = {place(span): span for span in of(spans, Kind.SEND)}
    for span in of(spans, Kind.RECEIVE):
        assert sent[place(span)].begin < span.end
    ran = {place(span): span for span in of(spans, Kind.FORWARD, Kind.BACKWARD)}
    for (chunk, microbatch, backward), message in sent.items():
        sender = ran[chunk if backward else chunk - 1, microbatch, backward]
        receiver = ran[chunk - 1 if backward else chunk, microbatch, backward]
        assert sender.end <= message.begin and sender.end <= receiver.begin


@each_kind
def test_bytes_from_the_cache_are_what_chunks_take(kind: str) -> None:
    """By the retentions of the layout; the peak is the plan's."""
    run, where = run_of(kind), layout_of(run_of(kind))
    residual, local = residual_of(run), local_share(run)
    taking = retentions(residual, where, run.pipeline.history_cache)
    for stage, rank in enumerate(found(kind)):
        taken = 0
        for chunk in where.chunks_of(stage):
            sizes = {spec.name: local.numel(spec) for spec in residual.state_at(where.sublayer(chunk)).history}
            taken += sum(sizes[name] for name in taking[chunk].taken)
        assert rank.cache_hit_bytes == ELEMENT * MICROBATCHES * taken
        assert rank.cache_bytes == (cached_bytes(run, len(found(kind)))[stage] if kind != "single" else 0)
    if kind in ("pp2_vp2", "pp2_vp2_overlap", "pp2_vp2_full"):
        assert any(rank.cache_hit_bytes for rank in found(kind))
