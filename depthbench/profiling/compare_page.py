"""Two recordings side by side as one HTML file that loads nothing."""

from html import escape
from pathlib import Path

from .compare import Comparison, Side
from .page import PATTERNS, Cell, header, page, section, table, text
from .report import chunks_per_stage, warning
from .report_sections import pass_bars
from .report_timeline import ABOUT, controls, framed, legend_of
from .view import view


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Makes the folder of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(comparison_page(comparison), encoding="utf-8")


def comparison_page(comparison: Comparison) -> str:
    """Typical steps on one time axis, the numbers, where the passes went. Everything from files is escaped."""
    sides = (comparison.first, comparison.second)
    head = ["a step", *(side.name for side in sides), "second / first"]
    rows = [[text(figure.name), *(Cell(escape(said)) for said in figure.texts)] for figure in comparison.figures]
    warnings = (warning(side.summary, f" in {side.name}") for side in sides)
    body = [
        header("Two recordings", " and ".join(side.name for side in sides), "".join(warnings)),
        PATTERNS,
        section("Timelines", f"A typical step of each, on one time axis. {ABOUT}", _timelines(sides)),
        section("Numbers", "", table(head, rows)),
        section(
            "Where the passes went",
            "The ranks' time from the first forward's begin to the last backward's end, all steps and ranks together.",
            pass_bars([(side.name, side.summary.passing, side.summary.bubble) for side in sides]),
        ),
    ]
    rounds = max(chunks_per_stage(side.recording, side.summary) for side in sides)
    return page("Two recordings: depthbench profile", "\n".join(body), rounds)


def _timelines(sides: tuple[Side, Side]) -> str:
    views = [view(side.recording, side.summary.typical_step) for side in sides]
    length = max(shown.end - shown.begin for shown in views)
    drawn = (
        f"<h3>{escape(side.name)}</h3>{framed(shown, length, side.summary)}"
        for side, shown in zip(sides, views, strict=True)
    )
    return controls() + "".join(drawn) + legend_of(views)
