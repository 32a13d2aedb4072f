"""A recording as one HTML file that explains itself and loads nothing."""

from html import escape
from pathlib import Path

from .events import Recording
from .page import PATTERNS, header, page
from .planned import num_stages
from .report_sections import edges, headlines, memory, passes, provenance, rank_bars, slowest
from .report_timeline import timelines
from .summary import Summary


def write_report(recording: Recording, summary: Summary, path: Path) -> None:
    path.write_text(report(recording, summary), encoding="utf-8")


def report(recording: Recording, summary: Summary) -> str:
    """The page. Everything that comes from files is escaped."""
    parts = [
        header(title(recording, summary), f"{_layout(recording, summary)} · {recording.folder}", warning(summary)),
        PATTERNS,
        headlines(summary),
        timelines(recording, summary),
        passes(summary),
        rank_bars(summary),
    ]
    if summary.edges:
        parts += [edges(summary), slowest(summary)]
    parts += [memory(summary), provenance(recording, summary)]
    named = f"{title(recording, summary)}: depthbench profile"
    return page(named, "\n".join(parts), chunks_per_stage(recording, summary))


def title(recording: Recording, summary: Summary) -> str:
    """Of what was recorded; plain text."""
    return " · ".join(name for name in (summary.run, summary.architecture) if name) or recording.folder.name


def chunks_per_stage(recording: Recording, summary: Summary) -> int:
    return 1 + max((max(edge.sender, edge.receiver) for edge in summary.edges), default=0) // num_stages(recording)


def warning(summary: Summary, where: str = "") -> str:
    """HTML; empty where no rank is missing. where: plain text, of several recordings."""
    if not summary.missing:
        return ""
    ranks = f"rank{_s(len(summary.missing))} {', '.join(map(str, summary.missing))}"
    return (
        f'<div class="warn" role="alert"><b>Missing{escape(where)}: {ranks}</b> of {summary.world_size}, without a '
        "finished step. All numbers are of the ranks that are there; of a wait for a missing one nobody knows whether "
        "it was idle or transfer.</div>"
    )


def _layout(recording: Recording, summary: Summary) -> str:
    stages, steps = num_stages(recording), len(summary.steps)
    return f"{summary.world_size} rank{_s(summary.world_size)}, {stages} stage{_s(stages)}, {steps} step{_s(steps)}"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
