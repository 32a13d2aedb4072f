"""The timelines of a page, and the controls that go with them."""

from .events import Recording
from .page import legend, section
from .parts import Part
from .summary import StepSummary, Summary
from .svg import row_labels, timeline_svg
from .units import duration, share
from .view import View, view

ABOUT = (
    "One row a stage, with the number of the microbatch; darker: a later chunk of the stage. Point at a box for its "
    "times and for the way of its microbatch."
)


def timelines(recording: Recording, summary: Summary) -> str:
    """The typical step, and on choice the shortest and the longest."""
    chosen = _chosen(summary)
    views = {step.step: view(recording, step.step) for step in chosen}
    choice = "".join(
        f'<option value="{step.step}"{" selected" if said == "typical" else ""}>step {step.step}, {said}: '
        f"{duration(step.length)}, bubble {share(step.bubble)}</option>"
        for step, said in chosen.items()
    )
    drawn = "".join(
        framed(shown, shown.end - shown.begin, summary, hidden=number != summary.typical_step)
        for number, shown in views.items()
    )
    first = next(iter(views.values()))
    which = f" Of replica data {first.data}, tensor {first.tensor}." if summary.world_size > len(first.rows) else ""
    picker = f'<label>step <select id="step">{choice}</select></label>'
    return section("Timeline", ABOUT + which, controls(picker) + drawn + legend_of(list(views.values())))


def controls(picker: str = "") -> str:
    """They act on all timelines of the page. picker: HTML of a further one."""
    zoom = '<label>zoom <input id="zoom" type="range" min="0" max="5" step="0.1" value="0"></label>'
    return f'<div class="tools">{picker}{zoom}<label><input id="messages" type="checkbox"> messages</label></div>'


def framed(shown: View, length: float, summary: Summary, *, hidden: bool = False) -> str:
    """length: microseconds that the width stands for."""
    marks = {step.step: (step.pass_begin, step.pass_end) for step in summary.steps}
    drawing = timeline_svg(shown, length, marks.get(shown.step))
    attributes = f'data-step="{shown.step}"{" hidden" if hidden else ""}'
    return f'<div class="view" {attributes}>{row_labels(shown)}<div class="pan" tabindex="0">{drawing}</div></div>'


def legend_of(views: list[View]) -> str:
    """Of what their timelines show."""
    found = {piece.part for shown in views for row in shown.rows for piece in row.pieces}
    return legend((part for part in Part if part in found), max(shown.rounds for shown in views))


def _chosen(summary: Summary) -> dict[StepSummary, str]:
    by_length = sorted(summary.steps, key=lambda step: step.length)
    named = {by_length[0]: "shortest", by_length[-1]: "longest"}
    named |= {step: "typical" for step in by_length if step.step == summary.typical_step}
    return named
