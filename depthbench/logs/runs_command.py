"""`depthbench runs`: run folders and where they stand."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from depthbench.errors import UserError

from .console import duration
from .overview import RunState, read_state, run_folders

_COLOURS = {"running": "green", "silent": "yellow", "failed": "red", "lost": "red", "refused": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="run folders, or folders of them (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print a list, no table")


def run(args: argparse.Namespace) -> int:
    """Run the command. Raises UserError for a folder that is not there."""
    roots: list[Path] = args.folders or [Path("runs")]
    for root in roots:
        if not root.is_dir():
            raise UserError(f"{root} is no folder; name run folders, or folders that hold some")
    states = [read_state(folder) for root in roots for folder in run_folders(root)]
    if args.json:
        print(json.dumps([asdict(state) for state in states], indent=1))
    elif not states:
        print(f"no runs in {', '.join(map(str, roots))}")
    else:
        Console(highlight=False).print(table(states))
    return 0


def table(states: list[RunState]) -> Table:
    found = Table(title=f"{len(states)} runs" if len(states) > 1 else None, title_justify="left")
    for heading in ("run", "architecture", "state"):
        found.add_column(heading, overflow="fold")
    for heading in ("step", "loss", "validation", "tok/s", "left"):
        found.add_column(heading, justify="right", no_wrap=True)
    found.add_column("why", overflow="fold")
    for state in states:
        colour = _COLOURS.get(state.state)
        found.add_row(
            escape(state.folder),
            escape(state.architecture),
            f"[{colour}]{state.state}[/]" if colour else state.state,
            f"{state.step}/{'?' if state.steps is None else state.steps}",
            *(_number(value, ".4f") for value in (state.loss, state.valid_loss)),
            _number(state.tokens_per_second, ",.0f"),
            "-" if state.eta_seconds is None else duration(state.eta_seconds),
            escape(_why(state)),
        )
    return found


def _why(state: RunState) -> str:
    if state.state == "silent" and state.quiet_seconds is not None:
        return f"nothing written for {duration(state.quiet_seconds)}"
    return state.reason


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
