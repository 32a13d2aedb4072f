"""`depthbench profile`: record some steps of a run, or look at recordings that are there."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

from depthbench.config.load import load_run
from depthbench.errors import UserError
from depthbench.options import at_least
from depthbench.planning.cluster import load_cluster
from depthbench.planning.console import print_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="a YAML file, or a name under configs/runs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="group choices and single settings")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to record (default: 3)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="steps before them (default: 2)")
    parser.add_argument(
        "--cluster", metavar="NAME", help="a name under launch/clusters/ or a YAML file: the planned step beside them"
    )
    parser.add_argument("--torch-trace", action="store_true", help="also torch.profiler's trace of each rank")
    parser.add_argument("--memory-snapshot", action="store_true", help="also CUDA's memory history of each rank")
    parser.add_argument("--report", metavar="FOLDER", help="make the files of a recording anew, and show its summary")
    parser.add_argument(
        "--compare", nargs=2, metavar=("A", "B"), help="two recordings side by side, into B/compare.html"
    )
    parser.add_argument(
        "--simulate", metavar="FOLDER", help="a recording's pass by the plan's simulator; key=value: with another batch"
    )
    parser.add_argument(
        "--json", action="store_true", help="with --report, --compare, --simulate: print JSON, no table"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status; raises UserError for what the user can mend."""
    if args.simulate and args.run:  # it takes settings and no RUN
        args.overrides, args.run = [args.run, *args.overrides], None
    chosen = [name for name in ("run", "report", "compare", "simulate") if getattr(args, name)]
    if len(chosen) != 1:
        raise UserError("give a RUN to record, or --report FOLDER, or --compare A B, or --simulate FOLDER")
    if args.run and args.json:
        raise UserError("--json is for --report, --compare and --simulate; a recording's files are JSON already")
    if args.cluster and not args.run:
        raise UserError(f"--cluster={args.cluster} is for a RUN to record: its plan is made then")
    if args.simulate:
        return _simulate(_recorded(args.simulate), args.overrides, args.json)
    if args.report:
        return _report(_recorded(args.report), args.json)
    if args.compare:
        first, second = map(_recorded, args.compare)
        return _compare(first, second, args.json)
    at_least(1, args, "steps")
    at_least(0, args, "warmup")
    from depthbench.training.profiled import profile

    settings = load_run(args.run, args.overrides)
    tools = replace(
        settings.profile,
        torch_trace=args.torch_trace or settings.profile.torch_trace,
        memory_snapshot=args.memory_snapshot or settings.profile.memory_snapshot,
    )
    cluster = load_cluster(args.cluster) if args.cluster else None
    return profile(replace(settings, profile=tools), args.warmup, args.steps, cluster)


def _recorded(folder: str) -> Path:
    """The folder of a recording, or the recording of a run folder."""
    inner = Path(folder) / "profile"
    return inner if inner.is_dir() and not (Path(folder) / "plan.json").is_file() else Path(folder)


def _report(folder: Path, as_json: bool) -> int:
    from .analysis import summarize
    from .events import load_recording
    from .render import summary_table, write_outputs

    recording = load_recording(folder)
    summary = summarize(recording)
    written = write_outputs(recording)
    if as_json:
        print(json.dumps(summary.as_dict(), indent=2))
    else:
        print_tables(summary_table(summary))
        print("\n".join(map(str, written)))
    return 0


def _compare(first: Path, second: Path, as_json: bool) -> int:
    from .compare import compare, comparison_table
    from .compare_page import write_comparison
    from .events import load_recording

    comparison = compare(load_recording(first), load_recording(second))
    page = second / "compare.html"
    write_comparison(comparison, page)
    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        print_tables(comparison_table(comparison))
        print(page)
    return 0


def _simulate(folder: Path, overrides: list[str], as_json: bool) -> int:
    from .analysis import summarize
    from .calibrate import calibrate
    from .events import load_recording

    recording = load_recording(folder)
    steps = summarize(recording).steps
    calibration = calibrate(recording, [step.step for step in steps])
    simulation = calibration.simulated(calibration.changed(overrides))
    found = {
        "measured_pass_seconds": median(step.pass_end - step.pass_begin for step in steps) / 1e6,
        "measured_bubble": median(step.bubble for step in steps),
        "simulated_pass_seconds": simulation.seconds,
        "simulated_bubble": calibration.bubble(simulation),
    }
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for kind in ("measured", "simulated"):
            seconds, bubble = found[f"{kind}_pass_seconds"], found[f"{kind}_bubble"]
            print(f"{kind}: a pass takes {seconds:.4g} s, bubble {bubble:.1%}")
    return 0
