"""Every span of a recording as a line of CSV, for a spreadsheet or pandas."""

import csv
from pathlib import Path

from .events import Recording

COLUMNS = (
    "rank",
    "step",
    "kind",
    "chunk",
    "microbatch",
    "direction",
    "begin_us",
    "end_us",
    "bytes",
    "tensors",
)


def write_table(recording: Recording, path: Path) -> None:
    """By rank, in the order of its spans. Empty where a span has no chunk, microbatch or direction."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for record in recording.ranks:
            for span in record.spans:
                direction = ("backward" if span.backward else "forward") if span.chunk >= 0 else ""
                numbers = [number if number >= 0 else "" for number in (span.chunk, span.microbatch)]
                times = [f"{time:.3f}" for time in (span.begin, span.end)]
                writer.writerow(
                    [record.rank, span.step, span.kind.value, *numbers, direction, *times, span.bytes, span.tensors]
                )
