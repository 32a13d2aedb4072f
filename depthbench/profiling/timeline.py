"""One step of a recording as a PNG: stages from top to bottom, time from left to right."""

from pathlib import Path
from typing import Any

from .events import Recording
from .parts import Part, Piece
from .style import COLORS, MEANINGS, fill, ink
from .summary import Summary
from .units import duration, share, time_unit
from .view import View, view

_WIDTH, _INK, _MUTED = 14.0, "#16202c", "#5b6675"
_DIGIT = 0.075
"""Inches that a digit of a microbatch's number takes."""


def draw_timeline(recording: Recording, summary: Summary, path: Path) -> None:
    """The typical step."""
    from matplotlib.figure import Figure  # takes half a second

    shown = view(recording, summary.typical_step)
    figure = Figure(figsize=(_WIDTH, 1.5 + 0.62 * len(shown.rows)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    scale, unit = time_unit(shown.end - shown.begin)
    _draw_rows(axes, shown, scale)
    axes.set_xlim(0, (shown.end - shown.begin) / scale)
    axes.set_ylim(len(shown.rows) - 0.45, -0.55)
    axes.set_yticks(range(len(shown.rows)), [f"stage {row.stage}" for row in shown.rows])
    axes.set_xlabel(f"{unit} of step {shown.step}, data {shown.data}, tensor {shown.tensor}", color=_MUTED)
    axes.tick_params(length=0, colors=_MUTED)
    axes.tick_params(axis="y", labelsize=11, labelcolor=_INK)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color="#e3e7ec", lw=0.8)
    axes.set_axisbelow(True)
    axes.set_title(_title(summary), loc="left", fontsize=12, color=_INK)
    _legend(figure, shown)
    figure.savefig(path, metadata={"Software": None})


def _title(summary: Summary) -> str:
    planned = f", planned {share(summary.planned_bubble)}" if summary.planned_bubble is not None else ""
    missing = f"; without ranks {', '.join(map(str, summary.missing))}" if summary.missing else ""
    # a dollar would start a formula
    named = ", ".join(name.replace("$", r"\$") for name in (summary.run, summary.architecture) if name)
    numbers = f"step {duration(summary.step)}, bubble {share(summary.bubble)}{planned}{missing}"
    return f"{named}: {numbers}" if named else numbers


def _draw_rows(axes: Any, shown: View, scale: float) -> None:
    from matplotlib.patches import Rectangle

    inches = (_WIDTH - 1.0) / max(shown.end - shown.begin, 1e-9)
    for y, row in enumerate(shown.rows):
        if row.record is None:
            middle = (shown.end - shown.begin) / scale / 2
            axes.text(middle, y, "no recording of this rank", ha="center", va="center", color=_MUTED, style="italic")
        for piece in row.pieces:
            color = _fill(piece, shown)
            at, width = (piece.begin - shown.begin) / scale, piece.length / scale
            look: dict[str, Any] = {"facecolor": color, "edgecolor": "white", "lw": 0.6}
            if piece.part in (Part.IDLE, Part.UNKNOWN):
                look = {"facecolor": "#f3f5f7", "edgecolor": color, "lw": 0, "hatch": "////"}
            height = 0.8 if piece.part.is_busy else 0.6
            axes.add_patch(Rectangle((at, y - height / 2), width, height, zorder=3, **look))
            label = str(piece.span.microbatch)
            if piece.part.is_busy and piece.length * inches > _DIGIT * len(label) + 0.02:
                text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8.5, "zorder": 4}
                axes.text(at + width / 2, y, label, color=ink(color), clip_on=True, **text)


def _fill(piece: Piece, shown: View) -> str:
    return fill(piece.part, piece.span.chunk // len(shown.rows), shown.rounds)


def _legend(figure: Any, shown: View) -> None:
    from matplotlib.patches import Patch

    handles = []
    for part in dict.fromkeys(piece.part for row in shown.rows for piece in row.pieces):
        if part.is_busy and shown.rounds > 1:
            for round_ in (0, shown.rounds - 1):
                stages = len(shown.rows)
                label = f"{MEANINGS[part]}, chunks {round_ * stages} to {(round_ + 1) * stages - 1}"
                handles.append((part, round_, Patch(color=fill(part, round_, shown.rounds), label=label)))
        elif part in (Part.IDLE, Part.UNKNOWN):
            hatched = Patch(label=MEANINGS[part], facecolor="#f3f5f7", edgecolor=COLORS[part], hatch="////")
            handles.append((part, 0, hatched))
        else:
            handles.append((part, 0, Patch(color=COLORS[part], label=MEANINGS[part])))
    handles.sort(key=lambda handle: (list(Part).index(handle[0]), handle[1]))
    patches = [patch for _, _, patch in handles]
    figure.legend(handles=patches, loc="outside lower left", ncols=5, frameon=False, fontsize=9, labelcolor=_INK)
