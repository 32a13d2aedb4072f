"""The console: one line a step in stable columns, and a progress bar where somebody watches."""

import math
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"


def step_line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """`step 12/300 | loss 3.1412 | grad 0.87 | lr 2.94e-04 | 412,310 tok/s (51,539/rank) | mfu 41.2% | mem 61.3GiB |
    skipped 0 | eta 3h12m`. A value that is not finite is printed as it is; one that is not known is `-`."""
    mfu = values.get("mfu", math.nan)
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {values['loss']:.4f}",
        f"grad {values['grad_norm']:.3g}",
        f"lr {values['lr']:.2e}",
        f"{values['tokens_per_second']:,.0f} tok/s ({values['tokens_per_second_per_rank']:,.0f}/rank)",
        "mfu -" if math.isnan(mfu) else f"mfu {mfu:.1%}",
        f"mem {values['memory_gib']:.2f}GiB",
        f"skipped {values['skipped']:.0f}",
        f"eta {duration(values['eta_seconds'])}",
    ]
    return " | ".join(parts)


class ConsoleLog:
    """Prints lines above a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int, done: int) -> None:
        self.console = Console(soft_wrap=True, highlight=False)
        self.progress: Progress | None = None
        if sys.stdout.isatty():
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("training", total=steps, completed=done)
            self.progress.start()

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    def advance(self, step: int) -> None:
        if self.progress:
            self.progress.update(self.task, completed=step)

    def close(self) -> None:
        if self.progress:
            self.progress.stop()
