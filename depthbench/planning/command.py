"""`depthbench plan RUN [key=value ...]`: what a run holds, computes, sends and takes, without starting it."""

import argparse
import json
import shlex
import sys

from rich.console import Console

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError

from .cluster import load_cluster
from .console import print_tables
from .memory import peak_memory
from .plan import Plan, make_plan
from .render import render, render_edges, render_memory, render_time
from .search import search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("run", metavar="RUN", help="a name under configs/runs/ or a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example residual=hc model=400m_L32 train.steps=100"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="T",
        help="length of the sequence whose forward FLOPs are counted (default: model.sequence_length)",
    )
    parser.add_argument("--cluster", metavar="NAME", help="a name under launch/clusters/ or a YAML file: adds times")
    parser.add_argument(
        "--gpus",
        metavar="N[,N...]",
        help="processes (default: one copy of the model); with --search, one or several numbers (default: 8 to 1024)",
    )
    parser.add_argument("--search", action="store_true", help="the fastest layouts that fit, for each number of GPUs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status, 1 where the run does not fit the cluster's devices; raises UserError
    for what the user can mend."""
    settings = load_run(args.run, args.overrides)
    gpus = _numbers(args.gpus)
    if args.search:
        return _search(settings, [args.run, *args.overrides], args.cluster, gpus, args.json)
    if gpus and len(gpus) > 1:
        raise UserError(f"--gpus={args.gpus}: several numbers need --search")
    cluster = load_cluster(args.cluster) if args.cluster else None
    plan = make_plan(settings, args.tokens, gpus[0] if gpus else None, cluster)
    if args.json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        show(plan)
    if shortage := plan.shortage(settings):
        print(f"depthbench: {shortage}", file=sys.stderr)
        return 1
    return 0


def _numbers(text: str | None) -> list[int] | None:
    try:
        numbers = None if text is None else [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--gpus={text}: give a number, or several with commas between") from None
    if numbers and min(numbers) < 1:
        raise UserError(f"--gpus={text} must be at least 1")
    return numbers


def show(plan: Plan) -> None:
    """Print the plan as tables."""
    edges = [render_edges(plan)] if plan.edges else []
    time = [render_time(plan)] if plan.time else []
    print_tables(render(plan), render_memory(plan), *edges, *time)
    assumed = [*plan.memory_assumptions, *(plan.time.assumptions if plan.time else [])]
    Console(soft_wrap=True).print(
        "assumed:\n" + "\n".join(f"- {line}" for line in assumed), style="dim", highlight=False
    )


def _search(settings: RunConfig, words: list[str], cluster: str | None, gpus: list[int] | None, as_json: bool) -> int:
    """words: those that `settings` were loaded from."""
    if cluster is None:
        raise UserError("--search needs --cluster NAME, for the devices' speed and memory")

    found = search(settings, load_cluster(cluster), peak_memory, gpus)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print_tables(found.render())
        for count, choices in found.choices.items():
            if choices:
                again = shlex.join(["plan", "--cluster", cluster, "--gpus", str(count), *words])
                print(f"{count} GPUs: depthbench {again} \\")
                print("    " + shlex.join(choices[0].overrides))
    return 0 if any(found.choices.values()) else 1
