"""A recording's files and its table for the console."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from .analysis import summarize
from .events import Recording
from .parts import Part
from .report import write_report
from .summary import Summary
from .table import write_table
from .timeline import draw_timeline
from .trace import write_trace
from .units import duration, rate, share, size

TRACE, TABLE, TIMELINE, REPORT = "trace.json", "spans.csv", "timeline.png", "report.html"
OUTPUTS = (TRACE, TABLE, TIMELINE, REPORT)


def write_outputs(recording: Recording) -> list[Path]:
    """Write trace, table, report and picture into the recording's folder, over older ones; returns their paths.

    Raises UserError as `summarize`.
    """
    trace, table, report, picture = (recording.folder / name for name in (TRACE, TABLE, REPORT, TIMELINE))
    write_trace(recording, trace)
    write_table(recording, table)
    summary = summarize(recording)
    write_report(recording, summary, report)
    draw_timeline(recording, summary, picture)
    return [trace, table, report, picture]


def summary_table(summary: Summary) -> Table:
    """The headline numbers, and what to look at first."""
    title = ", ".join(name for name in (summary.run, summary.architecture) if name)
    table = Table(title=escape(title) or None, show_header=False, title_justify="left")
    table.add_column()
    table.add_column("measured", justify="right")
    table.add_column("planned", justify="right", style="dim")

    def row(name: str, measured: str, beside: str = "", end: bool = False) -> None:
        table.add_row(name, measured, beside, end_section=end)

    def planned(said: str) -> str:
        return "" if said == "-" else f"planned {said}"

    if summary.missing:
        row("[bold red]ranks missing[/]", ", ".join(map(str, summary.missing)), f"of {summary.world_size}", end=True)
    row(f"step, median of {len(summary.steps)}", duration(summary.step), planned(duration(summary.planned_step)))
    row("tokens a second", f"{summary.tokens_per_second:,.0f}", end=True)
    row("bubble", share(summary.bubble), planned(share(summary.planned_bubble)))
    for part in (Part.IDLE, Part.TRANSFER, Part.UNKNOWN, Part.DATA, Part.REDUCE, Part.OPTIMIZER, Part.OTHER):
        if summary.passing.get(part):
            row(f"  {'exposed ' if part is Part.TRANSFER else ''}{part.value}", share(summary.passing[part]))
    table.add_section()
    beside = f"without cache {size(summary.sent_without_cache)}" if summary.sent_without_cache else ""
    row("sent a step", size(summary.sent_bytes), beside)
    row("taken from the history caches a step", size(summary.cache_hit_bytes))
    row("history cache, fullest rank", size(summary.cache_bytes))
    row("memory, fullest rank", size(summary.memory_bytes), end=True)
    slow = summary.slowest_ranks[0]
    row(f"computes longest: rank {slow.rank}", duration(slow.busy), f"idle {duration(slow.parts[Part.IDLE])}")
    for edge in summary.slowest_edges[:1]:
        said = f"slowest edge: {edge.name}, {edge.direction}"
        row(said, duration(edge.transfer), rate(edge.gigabytes_per_second))
    return table
