"""Tables on the console."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_tables(*tables: Table) -> None:
    """As wide as they need to be. On a narrower console, as a pipe is (80 columns), lines run on: rich would cut
    numbers short."""
    console = Console()
    unbounded = console.options.update(max_width=10_000)
    console.width = max(console.width, *(Measurement.get(console, unbounded, table).maximum for table in tables))
    for table in tables:
        console.print(table, soft_wrap=True)
