"""A recording as a Chrome trace, for ui.perfetto.dev, chrome://tracing and speedscope.

A process a rank, sorted by stage; its rows are what it computed, what it sent and what it received. An arrow leads from
each send to its receive.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .events import Kind, RankRecord, Recording, Span
from .parts import End, Key, Messages, messages, wait_pieces

_NANOSECOND = 1e-3
_ROWS = {"compute": 0, "send": 100, "receive": 200}
"""The first thread of each; the next ones are its further lanes."""


def trace(recording: Recording) -> dict[str, Any]:
    """The trace's JSON. Times in microseconds, as spans have them. A send whose receiver is missing has no arrow."""
    among = messages(recording)
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, Kind, Key], int] = {}
    for record in recording.ranks:
        events += _names(record)
        for row, first in _ROWS.items():
            for lane, spans in enumerate(_lanes(record, row)):
                thread = first + lane
                events += _thread_names(record.rank, thread, row if lane == 0 else f"{row} {lane + 1}")
                for span in spans:
                    events.append(_slice(record, span, thread, among))
                    threads[record.rank, span.kind, Key.of(record, span)] = thread
    for number, message in enumerate(among.values(), 1):
        if message.send is not None and message.receive is not None:
            # just before its end: at the end itself a slice is closed, and the arrow would find none
            arrived = max(message.receive.span.begin, message.receive.span.end - _NANOSECOND)
            for phase, end, time in (("s", message.send, message.send.span.begin), ("f", message.receive, arrived)):
                events.append(_arrow(phase, number, end, time, threads))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"missing ranks": recording.missing, "run": (recording.plan or {}).get("run")},
        "traceEvents": events,
    }


def write_trace(recording: Recording, path: Path) -> None:
    path.write_text(json.dumps(trace(recording)))


def _lanes(record: RankRecord, row: str) -> Iterator[list[Span]]:
    """The spans of one row, so that in a lane they nest (compute) or lie apart (messages, each to be pointed at)."""
    nesting = row == "compute"
    chosen = [span for span in record.spans if (span.kind.value if span.kind.is_message else "compute") == row]
    lanes: list[_Lane] = []
    for span in sorted(chosen, key=lambda span: (span.begin, -span.end)):
        lane = next((lane for lane in lanes if lane.takes(span, nesting)), None)
        if lane is None:
            lane = _Lane()
            lanes.append(lane)
        lane.spans.append(span)
        lane.open_ends.append(span.end)
    yield from (lane.spans for lane in lanes)


class _Lane:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.open_ends: list[float] = []

    def takes(self, span: Span, nesting: bool) -> bool:
        """Whether the next span, by its begin, fits: after all others, or within the innermost one."""
        while self.open_ends and self.open_ends[-1] <= span.begin:
            self.open_ends.pop()
        return not self.open_ends or (nesting and span.end <= self.open_ends[-1])


def _names(record: RankRecord) -> list[dict[str, Any]]:
    name = f"stage {record.pipeline}, data {record.data}, tensor {record.tensor}: rank {record.rank} on {record.host}"
    order = (record.data * record.world_size + record.tensor) * record.world_size + record.pipeline
    named = (("process_name", {"name": name}), ("process_sort_index", {"sort_index": order}))
    return [{"ph": "M", "pid": record.rank, "tid": 0, "name": kind, "args": args} for kind, args in named]


def _thread_names(rank: int, thread: int, name: str) -> list[dict[str, Any]]:
    named = (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": thread}))
    return [{"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": args} for kind, args in named]


def _slice(record: RankRecord, span: Span, thread: int, among: Messages) -> dict[str, Any]:
    name = span.kind.value.replace("_", " ")
    args: dict[str, Any] = {"step": span.step}
    if span.chunk >= 0:
        name += f" {span.microbatch}, chunk {span.chunk}"
        direction = "backward" if span.backward else "forward"
        args |= {"chunk": span.chunk, "microbatch": span.microbatch, "direction": direction}
    if span.kind.is_message:
        args |= {"bytes": span.bytes, "tensors": span.tensors}
    if span.kind.is_wait:
        for piece in wait_pieces(record, span, among):
            args[f"{piece.part.value} µs"] = round(piece.length, 3)
    where = {"pid": record.rank, "tid": thread, "ts": span.begin, "dur": span.end - span.begin}
    return {"ph": "X", "name": name, "cat": span.kind.value, **where, "args": args}


def _arrow(phase: str, number: int, end: End, time: float, threads: dict[tuple[int, Kind, Key], int]) -> dict[str, Any]:
    rank, kind = end.record.rank, end.span.kind
    where = {"pid": rank, "tid": threads[rank, kind, Key.of(end.record, end.span)], "ts": time}
    return {"ph": phase, "bp": "e", "id": number, "name": "message", "cat": "message", **where}
