"""The Chrome trace and the table say what the spans say."""

import csv
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from depthbench.profiling.events import Kind, Recording, Span
from depthbench.profiling.table import write_table
from depthbench.profiling.trace import trace, write_trace
from tests.profiling.recordings import Pipeline, by_hand, rank_record

FOLDER = Path("recorded")
RECORDINGS = {
    "by hand": by_hand(FOLDER),
    "interleaved": Pipeline().recording(FOLDER),
    "replicas": Pipeline(stages=2, replicas=2).recording(FOLDER),
    "slow wire": Pipeline(stages=3, microbatches=6, wire=2500).recording(FOLDER),
    "rank 1 missing": Pipeline().recording(FOLDER, missing=(1,)),
}
each = pytest.mark.parametrize("name", RECORDINGS)


Event = dict[str, Any]


def events(recording: Recording, *phases: str) -> list[Event]:
    return of(json.loads(json.dumps(trace(recording)))["traceEvents"], *phases)


def of(found: list[Event], *phases: str) -> list[Event]:
    return [event for event in found if event["ph"] in phases]


@each
def test_every_span_is_a_slice(name: str) -> None:
    recording = RECORDINGS[name]
    slices = Counter((e["pid"], e["cat"], e["ts"], e["args"].get("chunk", -1)) for e in events(recording, "X"))
    spans = Counter((r.rank, s.kind.value, s.begin, s.chunk) for r in recording.ranks for s in r.spans)
    assert slices == spans


@each
def test_bytes_add_up(name: str) -> None:
    recording = RECORDINGS[name]
    for kind in (Kind.SEND, Kind.RECEIVE):
        shown = sum(event["args"]["bytes"] for event in events(recording, "X") if event["cat"] == kind.value)
        assert shown == sum(s.bytes for r in recording.ranks for s in r.spans if s.kind is kind) > 0


@each
def test_slices_of_a_row_nest_and_messages_lie_apart(name: str) -> None:
    assert_nested(events(RECORDINGS[name], "X"))


def assert_nested(slices: list[Event]) -> None:
    rows = defaultdict(list)
    for event in slices:
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["cat"]))
    for found in rows.values():
        for at, (begin, end, kind) in enumerate(found):
            for other_begin, other_end, _ in found[:at]:
                apart = end <= other_begin or other_end <= begin
                nested = other_begin <= begin and end <= other_end
                assert apart or (nested and kind not in ("send", "receive"))


@each
def test_every_send_has_one_arrow_to_its_receive(name: str) -> None:
    """Only those of missing peers have none."""
    recording = RECORDINGS[name]
    sends, arrows = count_arrows(recording, events(recording, "X", "s", "f"))
    assert arrows == sends if not recording.missing else 0 < arrows < sends


def count_arrows(recording: Recording, found: list[Event], clock_error: float = 0.0) -> tuple[int, int]:
    """(sends, arrows). Both of an arrow's ends lie in one slice, and these are of one message, which arrives after it
    was sent, as far as clocks can tell."""
    slices = [event for event in of(found, "X") if event["cat"] in ("send", "receive")]

    def bound(arrow: Event) -> Event:
        (slice_,) = [
            event
            for event in slices
            if (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
            and event["ts"] <= arrow["ts"] < event["ts"] + event["dur"]
        ]
        return slice_

    starts, ends = of(found, "s"), {event["id"]: event for event in of(found, "f")}
    assert len({event["id"] for event in starts}) == len(starts) == len(ends)
    coordinates = {record.rank: (record.data, record.tensor) for record in recording.ranks}
    arrived = set()
    for start in starts:
        end = ends[start["id"]]
        assert start["bp"] == end["bp"] == "e" and start["ts"] <= end["ts"] + clock_error
        send, receive = bound(start), bound(end)
        assert (send["cat"], receive["cat"]) == ("send", "receive")
        assert send["args"] == receive["args"]
        assert coordinates[send["pid"]] == coordinates[receive["pid"]]
        arrived.add((id(send), id(receive)))
    sends = [event for event in slices if event["cat"] == "send"]
    assert len(arrived) == len(starts)
    if not recording.missing:
        assert len(sends) == len(slices) - len(sends)
    return len(sends), len(starts)


def test_rows_and_ranks_are_named() -> None:
    found = events(RECORDINGS["slow wire"], "M")
    named = {(e["pid"], e["tid"], e["args"]["name"]) for e in found if e["name"] == "thread_name"}
    assert {(0, 0, "compute"), (0, 100, "send"), (0, 200, "receive")} <= named
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert processes[2] == "stage 2, data 0, tensor 0: rank 2 on node2"
    order = {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"}
    assert sorted(order, key=lambda rank: order[rank]) == [0, 1, 2]


def test_messages_that_overlap_take_lanes() -> None:
    spans = [
        Span(Kind.SEND, begin, begin + 10, 1, 1, number, False, 8, 1) for number, begin in enumerate((0, 5, 8, 15))
    ]
    recording = Recording(FOLDER, [rank_record(0, 2, spans)], [1], None)
    assert [event["tid"] for event in events(recording, "X")] == [100, 100, 101, 102]
    assert not events(recording, "s", "f")


def test_a_wait_says_what_it_was() -> None:
    waits = [event for event in events(RECORDINGS["by hand"], "X") if event["cat"] == "wait_receive"]
    assert waits[0]["name"] == "wait receive 0, chunk 1"
    assert (waits[0]["args"]["idle µs"], waits[0]["args"]["transfer µs"]) == (23, 3)


def test_files(tmp_path: Path) -> None:
    recording = RECORDINGS["replicas"]
    write_trace(recording, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace(recording)
    write_table(recording, tmp_path / "spans.csv")
    with (tmp_path / "spans.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    spans = [(record.rank, span) for record in recording.ranks for span in record.spans]
    assert len(rows) == len(spans)
    for row, (rank, span) in zip(rows, spans, strict=True):
        assert (int(row["rank"]), row["kind"], int(row["step"])) == (rank, span.kind.value, span.step)
        assert float(row["begin_us"]) == pytest.approx(span.begin, abs=1e-3)
        assert float(row["end_us"]) == pytest.approx(span.end, abs=1e-3)
        assert (int(row["bytes"]), int(row["tensors"])) == (span.bytes, span.tensors)
        way = {True: "backward", False: "forward"}[span.backward]
        expected = (str(span.chunk), str(span.microbatch), way) if span.chunk >= 0 else ("", "", "")
        assert (row["chunk"], row["microbatch"], row["direction"]) == expected
