"""The numbers of recordings whose times are written down."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from depthbench.errors import UserError
from depthbench.profiling.analysis import summarize
from depthbench.profiling.events import Kind, Recording, Span
from depthbench.profiling.parts import Part, messages, pieces
from tests.profiling.recordings import Pipeline, by_hand, rank_record

FOLDER = Path("recorded")


def parts(**times: float) -> dict[Part, float]:
    """Those that are not named are 0."""
    return {part: times.get(part.name.lower(), 0.0) for part in Part}


def test_waits_are_split_where_the_peer_posted_its_end() -> None:
    recording = by_hand(FOLDER)
    found = [
        [
            (piece.part, piece.begin, piece.end)
            for piece in pieces(record, messages(recording))
            if piece.span.kind.is_wait
        ]
        for record in recording.ranks
    ]
    idle, transfer = Part.IDLE, Part.TRANSFER
    assert found[0] == [(idle, 25, 48), (transfer, 48, 51), (idle, 60, 70), (transfer, 70, 75)]
    assert found[1] == [(idle, 3, 15), (transfer, 15, 20), (transfer, 70, 74)]


def test_ranks() -> None:
    first, second = summarize(by_hand(FOLDER)).ranks
    assert first.parts == parts(forward=20, backward=19, idle=33, transfer=8, data=5, reduce=5, optimizer=8, other=2)
    assert second.parts == parts(forward=18, backward=32, idle=12, transfer=9, reduce=10, optimizer=6, other=9)
    assert (first.step, second.step) == (100, 96)
    assert (first.busy, second.busy) == (39, 50)
    assert (first.sent_bytes, second.cache_hit_bytes) == (8000, 60)


def test_the_bubble_is_what_of_the_pass_is_not_computed() -> None:
    """The pass is 80 µs, so the two ranks had 160, and computed 39 and 50."""
    summary = summarize(by_hand(FOLDER))
    (step,) = summary.steps
    assert (step.pass_begin, step.pass_end, step.length) == (5, 85, 100)
    assert [step.bubble, summary.bubble] == [pytest.approx(1 - 89 / 160)] * 2
    # of rank 1's wait from 3 to 20, two lie before the pass; of its reduce from 80 to 90, five lie after it
    shares = parts(forward=38, backward=51, idle=43, transfer=17, reduce=5, other=6)
    assert summary.passing == {part: pytest.approx(time / 160) for part, time in shares.items()}
    assert summary.exposed == summary.passing[Part.TRANSFER]
    assert (summary.step, summary.tokens_per_second) == (100, 640_000)


def test_edges() -> None:
    forward, backward = summarize(by_hand(FOLDER)).edges
    assert (forward.sender, forward.receiver, forward.direction, forward.messages) == (0, 1, "forward", 2)
    assert (backward.sender_stage, backward.receiver_stage, backward.direction) == (1, 0, "backward")
    assert (forward.bytes, forward.tensors, forward.planned_bytes, forward.as_planned) == (4000, 2, None, None)
    # forward: 15 to 20 and 25 to 47; backward: 48 to 51 and 70 to 75
    assert (forward.transfer, forward.worst, backward.transfer, backward.worst) == (13.5, 22, 4, 5)
    assert backward.gigabytes_per_second == pytest.approx(4000 / 4 / 1000)
    assert (forward.idle, forward.exposed) == (6, 2.5)  # the second message was there before it was asked for
    assert (backward.idle, backward.exposed) == (16.5, 4)


def test_the_slowest() -> None:
    summary = summarize(Pipeline().recording(FOLDER))
    assert summary.slowest_ranks[0].rank == 1
    times = [edge.transfer or 0 for edge in summary.slowest_edges]
    assert times == sorted(times, reverse=True) and len(times) == 14


def test_steps_take_their_median_and_the_typical_one_is_there() -> None:
    recording = by_hand(FOLDER)
    lengths = (100.0, 400.0, 120.0)
    records = []
    for record in recording.ranks:
        spans, start = [], 0.0
        for step, length in enumerate(lengths, 1):
            for span in record.spans:
                end = length if span.kind is Kind.STEP else span.end
                spans.append(replace(span, begin=span.begin + start, end=end + start, step=step))
            start += 500
        records.append(replace(record, spans=spans, tokens=[64, 64, 64]))
    summary = summarize(replace(recording, ranks=records))
    assert (summary.step, summary.typical_step, summary.ranks[1].step) == (120, 3, 120)
    assert [step.length for step in summary.steps] == [100, 400, 120]
    assert summary.ranks[0].parts[Part.FORWARD] == pytest.approx(20)
    assert sum(summary.ranks[0].parts.values()) == pytest.approx(sum(lengths) / 3)
    assert (summary.edges[0].messages, summary.sent_bytes) == (6, 16_000)
    assert summary.ranks[1].cache_hit_bytes == 20


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (2, 2), (4, 2)])
def test_against_a_plan(stages: int, virtual: int) -> None:
    pipeline = Pipeline(stages=stages, virtual=virtual, replicas=2)
    summary = summarize(pipeline.recording(FOLDER))
    chunks = range(1, stages * virtual)
    found = [(edge.sender, edge.receiver) for edge in summary.edges]
    assert found == [*((c - 1, c) for c in chunks), *((c, c - 1) for c in reversed(chunks))]
    assert all(edge.as_planned and edge.bytes == edge.planned_bytes for edge in summary.edges)
    assert all(edge.messages == 8 * 3 * 2 for edge in summary.edges)
    assert summary.sent_bytes == sum(8 * 2 * edge.bytes for edge in summary.edges)
    assert summary.sent_without_cache == sum(8 * 2 * (edge.bytes_without_cache or 0) for edge in summary.edges)
    assert (summary.run, summary.planned_bubble, summary.planned_step) == ("synthetic", 0.2, 50_000)


def test_other_bytes_than_planned_are_told() -> None:
    recording = Pipeline(stages=2, virtual=1).recording(FOLDER)
    assert recording.plan is not None
    recording.plan["edges"][0]["bytes"] += 1
    assert [edge.as_planned for edge in summarize(recording).edges] == [False, True]


def test_a_single_process() -> None:
    """No messages: what is not computed is other."""
    spans = [Span(Kind.STEP, 0, 50, 1), Span(Kind.FORWARD, 10, 20, 1, 0, 0), Span(Kind.BACKWARD, 25, 40, 1, 0, 0)]
    summary = summarize(Recording(FOLDER, [rank_record(0, 1, spans)], [], None))
    assert summary.bubble == pytest.approx(5 / 30)
    assert not summary.edges and summary.sent_bytes == 0
    assert summary.passing[Part.OTHER] == pytest.approx(5 / 30)


def test_missing_ranks() -> None:
    """Waits for them are unknown; their neighbours' messages still count."""
    summary = summarize(Pipeline().recording(FOLDER, missing=(2,)))
    assert summary.missing == [2] and [rank.rank for rank in summary.ranks] == [0, 1, 3]
    assert [rank.parts[Part.UNKNOWN] > 0 for rank in summary.ranks] == [False, True, True]
    assert summary.ranks[2].parts[Part.IDLE] > 0  # of what it waited for stage 0
    edge = summary.edges[1]
    assert (edge.sender, edge.messages, edge.as_planned, edge.transfer) == (1, 24, True, None)


def test_a_rank_that_finished_no_step_counts_as_missing() -> None:
    recording = Pipeline().recording(FOLDER)
    recording.ranks[3] = replace(recording.ranks[3], spans=recording.ranks[3].spans[:5])
    assert summarize(recording).missing == [3]


def test_only_steps_that_all_finished_count() -> None:
    recording = Pipeline().recording(FOLDER)
    unfinished = [span for span in recording.ranks[3].spans if span.step < 3]
    recording.ranks[3] = replace(recording.ranks[3], spans=unfinished)
    assert [step.step for step in summarize(recording).steps] == [1, 2]


def test_no_finished_step_at_all() -> None:
    with pytest.raises(UserError, match="record again"):
        summarize(Recording(FOLDER, [rank_record(0, 1, [Span(Kind.FORWARD, 0, 1, 1, 0, 0)])], [], None))


@pytest.mark.parametrize("planned", [True, False])
def test_as_dict_is_plain(planned: bool) -> None:
    plain = summarize(Pipeline().recording(FOLDER, planned=planned)).as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["ranks"][0]["parts"]["forward"] > 0 and plain["passing"]["idle"] > 0
