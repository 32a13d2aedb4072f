"""Two exports that were never trained, with weights at which mistakes show, and what a process without network says."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from depthbench.convert.export import export
from tests.convert.checkpoints import case, run_of, saved
from tests.corpora import Corpus

ROOT = Path(__file__).resolve().parents[2]
POSITIONS = 512
CASES = {
    "pre_ln": case("pre_ln", num_layers=2, sequence_length=POSITIONS),
    "block_attnres": case(
        "block_attnres", residual={"sublayers_per_block": 3}, num_layers=2, sequence_length=POSITIONS
    ),
}
Job = dict[str, Any]
Answer = dict[str, Any]


def exported(corpus: Corpus, folder: Path) -> dict[str, Path]:
    """Run folders under `folder`/runs, their exports beside it."""
    for name, settings in CASES.items():
        run = saved(run_of(corpus, folder / "runs" / name, settings))
        export(run, folder / name, warn=lambda line: None)
    return {name: folder / name for name in CASES}


def ask(folder: Path, jobs: list[Job]) -> list[Answer]:
    """Each job's answer by `offline.py`, in one process."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.evaluation.offline", f"{folder}/jobs.json", f"{folder}/answers.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[Answer] = json.loads((folder / "answers.json").read_text())
    return answers
