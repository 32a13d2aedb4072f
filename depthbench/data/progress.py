"""Progress of a prepare: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from depthbench.data.sources import Unit

_SECONDS_BETWEEN_LINES = 30.0


class PrepareProgress:
    """Listens to the workers; use as a context manager around them.

    Args:
        units: all units of the run, whose sizes give the total.
        finished: numbers of those done by an earlier, interrupted run.
    """

    def __init__(self, units: tuple[Unit, ...], finished: set[int]) -> None:
        self._sizes = [sum(piece.size for piece in unit) for unit in units]
        self._total = sum(self._sizes)
        self._done = sum(self._sizes[unit] for unit in finished)
        self._units_done = len(finished)
        self._characters = 0
        self._start = self._last_line = time.monotonic()
        console = Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("tokenizing"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._text(), total=self._total, completed=self._done)

    def __enter__(self) -> "PrepareProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def on_text(self, characters: int) -> None:
        self._characters += characters
        self._show()

    def on_unit(self, unit: int) -> None:
        self._done += self._sizes[unit]
        self._units_done += 1
        self._show()

    def _text(self) -> str:
        rate = self._characters / max(time.monotonic() - self._start, 1e-9)
        return (
            f"{self._units_done}/{len(self._sizes)} units, {self._characters / 1e6:.1f} M characters, "
            f"{rate / 1e6:.2f} M/s"
        )

    def _show(self) -> None:
        if not self._bar.disable:
            self._bar.update(self._task, completed=self._done, description=self._text())
        elif time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"tokenizing {100 * self._done / self._total:.0f} %: {self._text()}", file=sys.stderr, flush=True)
