"""Is a simulated step as long as a real one? Two stages on two cores, with one chunk each and with two.

    python benchmarks/profile/simulation.py [--steps 12] [key=value ...]

For each layout two processes, each bound to a core of its own, train the quickstart (its data has to be prepared:
launch/quickstart.sh) and record themselves. The simulator gets mean costs of every other recorded step, and is compared
with the means of the rest.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from depthbench.config.load import load_run
from depthbench.profiling.analysis import summarize
from depthbench.profiling.calibrate import calibrate
from depthbench.profiling.events import load_recording

LAYOUTS = {"PP2": "parallel=pp2", "PP2 VP2": "parallel=pp2_vp2"}
MODEL = ("model.num_layers=8", "train.micro_batch=2", "train.precision=fp32", "data.workers=0")


def worker(words: list[str], steps: int) -> int:
    """One rank, on the core of its number."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    from depthbench.training.profiled import profile

    return profile(load_run("quickstart", words), warmup=3, steps=steps)


def record(words: list[str], steps: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, __file__, "--worker", "--steps", str(steps), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def compared(folder: Path) -> dict[str, float]:
    recording = load_recording(folder)
    steps = summarize(recording).steps
    given, measured = steps[::2], steps[1::2]
    calibration = calibrate(recording, [step.step for step in given])
    simulation = calibration.simulated()
    outside = mean(step.length - (step.pass_end - step.pass_begin) for step in given)
    return {
        "measured_step": mean(step.length for step in measured) / 1e6,
        "simulated_step": simulation.seconds + outside / 1e6,
        "measured_bubble": mean(step.bubble for step in measured),
        "simulated_bubble": calibration.bubble(simulation),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.exit(worker(args.words, args.steps))
    found = {}
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            record([layout, *MODEL, f"run_dir={folder}", *args.words], args.steps)
            found[name] = compared(Path(folder) / "profile")
    if args.json:
        print(json.dumps(found, indent=1))
        return
    table = Table(title="a step, simulated and measured")
    for heading in ("layout", "measured, s", "simulated, s", "ratio", "bubble measured", "bubble simulated"):
        table.add_column(heading, justify="right")
    for name, row in found.items():
        table.add_row(
            name,
            f"{row['measured_step']:.3f}",
            f"{row['simulated_step']:.3f}",
            f"{row['simulated_step'] / row['measured_step']:.3f}",
            f"{row['measured_bubble']:.1%}",
            f"{row['simulated_bubble']:.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
