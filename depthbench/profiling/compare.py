"""Two recordings side by side, as objects, plain data and a table for the console."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.markup import escape
from rich.table import Table

from .analysis import summarize
from .events import Recording
from .parts import Part
from .report import title
from .summary import Summary
from .units import duration, share, size, whole


@dataclass(frozen=True)
class Side:
    """name: its title, or its folder where both have the same title."""

    name: str
    recording: Recording
    summary: Summary


@dataclass(frozen=True)
class Figure:
    """A number of both, None where unknown. said: either as people read it."""

    name: str
    first: float | None
    second: float | None
    said: Callable[[float | None], str]

    @property
    def ratio(self) -> float | None:
        """Of the second to the first."""
        return self.second / self.first if self.first and self.second is not None else None

    @property
    def texts(self) -> tuple[str, str, str]:
        """First, second, ratio."""
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f} x"
        return self.said(self.first), self.said(self.second), ratio


@dataclass(frozen=True)
class Comparison:
    first: Side
    second: Side

    @property
    def figures(self) -> list[Figure]:
        """The headline numbers. Bytes and microseconds of a step; shares are of the pass."""
        a, b = self.first.summary, self.second.summary
        return [
            Figure("step, median", a.step, b.step, duration),
            Figure("tokens a second", a.tokens_per_second, b.tokens_per_second, whole),
            Figure("bubble", a.bubble, b.bubble, share),
            Figure("bubble, planned", a.planned_bubble, b.planned_bubble, share),
            *(Figure(f"{p.value}, of the pass", a.passing[p], b.passing[p], share) for p in (Part.IDLE, Part.TRANSFER)),
            *(
                Figure(f"{part.value}, mean rank", _mean(a, part), _mean(b, part), duration)
                for part in (Part.FORWARD, Part.BACKWARD, Part.REDUCE, Part.OPTIMIZER)
            ),
            Figure("sent between stages", a.sent_bytes, b.sent_bytes, size),
            Figure("taken from the history caches", a.cache_hit_bytes, b.cache_hit_bytes, size),
            Figure("history cache, fullest rank", a.cache_bytes, b.cache_bytes, size),
            Figure("memory, fullest rank", a.memory_bytes, b.memory_bytes, size),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: times in microseconds, bytes, fractions. A ratio is the second's to the first's."""
        sides = [{"name": side.name, "summary": side.summary.as_dict()} for side in (self.first, self.second)]
        plain = {one.name: {"first": one.first, "second": one.second, "ratio": one.ratio} for one in self.figures}
        return {"first": sides[0], "second": sides[1], "figures": plain}


def compare(first: Recording, second: Recording) -> Comparison:
    """Raises UserError as `summarize`, for either."""
    summaries = summarize(first), summarize(second)
    names = [title(*both) for both in zip((first, second), summaries, strict=True)]
    if names[0] == names[1]:
        names = [str(recording.folder) for recording in (first, second)]
    return Comparison(Side(names[0], first, summaries[0]), Side(names[1], second, summaries[1]))


def comparison_table(comparison: Comparison) -> Table:
    """For the console."""
    table = Table()
    table.add_column("a step", no_wrap=True)
    for side in (comparison.first, comparison.second):
        table.add_column(escape(side.name), justify="right", overflow="fold")
    table.add_column("second / first", justify="right")
    for figure in comparison.figures:
        table.add_row(figure.name, *figure.texts)
    return table


def _mean(summary: Summary, part: Part) -> float:
    return mean(rank.parts[part] for rank in summary.ranks)
