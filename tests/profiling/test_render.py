"""The files of a recording, its picture and its table for the console."""

import io
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from depthbench.profiling.analysis import summarize
from depthbench.profiling.compare import compare, comparison_table
from depthbench.profiling.events import Recording, load_recording, save_rank
from depthbench.profiling.render import summary_table, write_outputs
from depthbench.profiling.timeline import draw_timeline
from tests.profiling.recordings import Pipeline, by_hand


def said(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_outputs_of_a_recording_from_disk(tmp_path: Path) -> None:
    for record in Pipeline().recording(tmp_path).ranks[:3]:
        save_rank(tmp_path, record)
    recording = load_recording(tmp_path)
    assert (recording.missing, recording.plan) == ([3], None)
    written = write_outputs(recording)
    assert [path.name for path in written] == ["trace.json", "spans.csv", "report.html", "timeline.png"]
    assert all(path.parent == tmp_path and path.stat().st_size > 1000 for path in written)
    assert write_outputs(load_recording(tmp_path)) == written


@pytest.mark.parametrize(
    "recording",
    [
        by_hand(Path("recorded")),
        Pipeline(stages=8, microbatches=8).recording(Path("recorded")),
        Pipeline(stages=3, virtual=1, microbatches=6).recording(Path("recorded"), missing=(0,)),
    ],
)
def test_a_picture_is_drawn(recording: Recording, tmp_path: Path) -> None:
    """With as much blue and green as the step has forward and backward time, or nearly."""
    draw_timeline(recording, summarize(recording), tmp_path / "timeline.png")
    pixels = (matplotlib.image.imread(tmp_path / "timeline.png")[..., :3] * 255).round().astype(int)
    assert pixels.shape[1] == 1540
    red, green, blue = (pixels[..., channel] for channel in range(3))
    share_forward, share_backward = ((blue - red > 60) & (blue > green + 15)).mean(), (green > blue + 5).mean()
    assert share_forward > 0.02 and share_backward > 0.02


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    recording = Pipeline().recording(tmp_path)
    named = replace(recording, plan={**(recording.plan or {}), "run": "a $\\frac b$"})
    draw_timeline(named, summarize(named), tmp_path / "timeline.png")


def test_the_console_table() -> None:
    recording = Pipeline().recording(Path("recorded"))
    summary = summarize(recording)
    text = said(summary_table(summary))
    for expected in ("synthetic", "planned 20.0 %", f"{100 * summary.bubble:.1f} %", "computes longest: rank 1"):
        assert expected in text
    assert "missing" not in text
    damaged = said(summary_table(summarize(Pipeline().recording(Path("recorded"), missing=(2,), planned=False))))
    assert "ranks missing" in damaged and "planned" not in damaged


def test_the_console_table_of_two() -> None:
    first, second = Pipeline().recording(Path("one[/]")), Pipeline(virtual=1).recording(Path("two"))
    text = said(comparison_table(compare(first, second)))
    assert "one[/]" in text and "second / first" in text and "0.5" in text
