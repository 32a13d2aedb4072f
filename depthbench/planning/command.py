"""`depthbench plan RUN [key=value ...]`: what a run holds and computes, without starting it."""

import argparse
import json

from rich.console import Console

from depthbench.config.load import load_run

from .plan import make_plan, render, render_edges


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
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status; raises UserError for what the user can mend."""
    plan = make_plan(load_run(args.run, args.overrides), args.tokens)
    if args.json:
        print(json.dumps(plan.as_dict(), indent=2))
    else:
        Console().print(render(plan))
        if plan.edges:
            Console().print(render_edges(plan))
    return 0
