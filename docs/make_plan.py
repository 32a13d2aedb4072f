"""Rewrites the outputs shown in docs/plan.md, by planning what the page says.

python docs/make_plan.py            # rewrite
python docs/make_plan.py --check    # exit with 1 if the page is not up to date
"""

import argparse
import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from depthbench.config.load import load_run
from depthbench.planning.cluster import load_cluster
from depthbench.planning.command import add_arguments, run
from depthbench.planning.memory import peak_memory
from depthbench.planning.plan import Plan, make_plan
from depthbench.planning.render import render, render_edges, render_memory, render_time
from depthbench.planning.search import search

if TYPE_CHECKING:
    from docs.make_reference import replaced, settle
else:  # as a script, this folder is on the path
    from make_reference import replaced, settle

PAGE = Path(__file__).with_name("plan.md")
DEPTHS = ("1600m_L28", "1600m_L40", "1600m_L54")
MARKDOWN = ("assumed", "best")  # blocks that are no console's
COMMAND = re.compile(r"^depthbench plan ((?:.*\\\n)*.*)", re.MULTILINE)


def words(page: str, number: int) -> argparse.Namespace:
    """The arguments of the page's command of that number, from 0."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(COMMAND.findall(page)[number].replace("\\\n", " ").split())


def planned(args: argparse.Namespace) -> Plan:
    return make_plan(load_run(args.run, args.overrides), None, int(args.gpus), load_cluster(args.cluster))


def searched(args: argparse.Namespace) -> Table:
    counts = [int(count) for count in args.gpus.split(",")]

    return search(load_run(args.run, args.overrides), load_cluster(args.cluster), peak_memory, counts).render()


def best(args: argparse.Namespace) -> str:
    """Of each depth and number of GPUs the fastest layout, as Markdown."""
    heads = ["model", "GPUs", "tensor", "pipeline", "chunks", "data", "micro", "recompute"]
    heads += ["GiB", "step, s", "bubble", "MFU", "GPU-hours"]
    rows = [heads, ["---"] * 2 + ["---:"] * (len(heads) - 2)]
    cluster, counts = load_cluster(args.cluster), [int(count) for count in args.gpus.split(",")]
    for depth in DEPTHS:
        run = load_run(args.run, [*args.overrides, f"model={depth}"])
        for gpus, (choice,) in search(run, cluster, peak_memory, counts, shown=1).choices.items():
            parallel, time = choice.run.parallel, choice.time
            layout = (parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, choice.replicas)
            times = (f"{time.step:.3f}", f"{time.bubble:.1%}", f"{time.mfu:.1%}", f"{time.gpu_hours:,.0f}")
            chosen = (*layout, choice.run.train.micro_batch, parallel.recompute.value)
            rows.append([f"`{depth}`", *map(str, (gpus, *chosen)), f"{choice.memory / 2**30:.1f}", *times])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown(table: Table) -> str:
    """As a wide console shows it."""
    console = Console(file=io.StringIO(), width=130)
    console.print(table)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def refusal(args: argparse.Namespace) -> str:
    """What the command says on stderr."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        assert run(args) == 1
    return str(said.getvalue())


def assumed(plan: Plan) -> str:
    assert plan.time
    return "\n".join(f"- {line}" for line in (*plan.memory_assumptions, *plan.time.assumptions))


def blocks(page: str) -> dict[str, Callable[[], str]]:
    plan = planned(words(page, 0))
    return {
        "counts": lambda: shown(render(plan)),
        "memory": lambda: shown(render_memory(plan)),
        "edges": lambda: shown(render_edges(plan)),
        "time": lambda: shown(render_time(plan)),
        "assumed": lambda: assumed(plan),
        "refusal": lambda: refusal(words(page, 1)),
        "search": lambda: shown(searched(words(page, 2))),
        "best": lambda: best(words(page, 3)),
    }


def updated(page: str) -> str:
    """`page` with the outputs between its markers replaced."""
    for name, generated in blocks(page).items():
        begin = f"<!-- begin generated: python docs/make_plan.py {name} -->"
        lines = "\n".join(line.rstrip() for line in generated().splitlines())
        page = replaced(page, begin, lines if name in MARKDOWN else f"```\n{lines}\n```", PAGE.name)
    return page


def main() -> int:
    return settle(PAGE, updated(PAGE.read_text()))


if __name__ == "__main__":
    sys.exit(main())
