"""Loss curves of several runs in one picture: python tools/compare_runs.py OUT.png RUN_FOLDER [RUN_FOLDER ...]"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def curve(folder: Path, field: str) -> tuple[list[int], list[float]]:
    """Steps and values of a field of `metrics.jsonl`, where it was measured."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line[field]) for line in lines if field in line]
    return [step for step, _ in found], [value for _, value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for number, folder in enumerate(args.folders):
        color = f"C{number}"
        axes.plot(*curve(folder, "loss"), color=color, alpha=0.35, linewidth=1)
        axes.plot(*curve(folder, "eval/loss"), "o-", color=color, label=f"{folder.name} (validation)")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(args.output, dpi=120)


if __name__ == "__main__":
    main()
