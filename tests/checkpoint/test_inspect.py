"""`tools/inspect_checkpoint.py`: what it says of checkpoints that the trainer wrote, whole and broken."""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from depthbench.checkpoint.folder import latest
from depthbench.checkpoint.inspect import Contents, inspect, render, run
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError
from depthbench.planning.parameters import count_parameters
from tests.corpora import Corpus, trainable_run
from tests.harness import run_workers
from tests.training.test_resume import training

from .reading import read_checkpoint

TOOL = Path(__file__).parents[2] / "tools" / "inspect_checkpoint.py"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"distributed_optimizer": False}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True, "distributed_optimizer": True}),
}


def train(corpus: Corpus, folder: Path, layout: str) -> RunConfig:
    world_size, parallel = LAYOUTS[layout]
    steps = {"steps": 2, "precision": "bf16", "eval_every": 0}
    run = trainable_run(corpus, folder, parallel=parallel, train=steps)
    assert run_workers(world_size, training, run) == [0] * world_size
    return run


def text(contents: Contents) -> str:
    """The rendered table without line breaks and frames."""
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render(contents))
    return " ".join(console.export_text().split())


def test_what_it_lists(corpus: Corpus, tmp_path: Path) -> None:
    """Every tensor once and whole, the same for every layout; the model's elements are the planned parameters."""
    settings = train(corpus, tmp_path / "one", "one")
    contents = inspect(tmp_path / "one")
    assert (contents.run, contents.step, contents.architecture) == ("tiny", 2, "block_attnres")
    assert contents.precision == "bf16"
    assert not contents.fault
    stored = read_checkpoint(contents.path)
    listed = {t.name: (t.shape, t.dtype) for tensors in contents.groups.values() for t in tensors}
    assert listed == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
    assert [t.name for t in contents.groups["other"]] == ["random.cpu"]
    assert contents.totals("model")["elements"] == count_parameters(settings).total
    assert contents.totals("model")["bytes"] == sum(t.nbytes for n, t in stored.items() if n.startswith("model."))
    shown = text(contents)
    assert "tiny: block_attnres, step 2, bf16" in shown
    assert "model.blocks.1.attention.q.weight" in shown
    assert "32 x 32" in shown
    assert "all files are present" in shown

    train(corpus, tmp_path / "tp2_sp", "tp2_sp")
    other = inspect(tmp_path / "tp2_sp")
    assert [other.groups[g] for g in ("model", "optimizer")] == [contents.groups[g] for g in ("model", "optimizer")]


def test_files_that_are_lost(corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Complete: exit 0. A lost file: 1, and it says which. No checkpoint: an error."""
    train(corpus, tmp_path, "one")
    checkpoint = latest(tmp_path / "checkpoints")
    assert checkpoint
    words = argparse.Namespace(path=checkpoint.path, json=True)
    capsys.readouterr()
    assert run(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["complete"] and said["step"] == 2
    assert said["totals"]["optimizer"]["tensors"] == len(said["tensors"]["optimizer"])
    assert {"name": "model.readout.norm.weight", "shape": [32], "dtype": "bfloat16"} in said["tensors"]["model"]

    lost = next(checkpoint.path.glob("*.distcp"))
    lost.unlink()
    assert f"{lost.name} is missing" in text(inspect(tmp_path / "checkpoints"))
    assert run(words) == 1
    assert f"{lost.name} is missing" in json.loads(capsys.readouterr().out)["fault"]

    (checkpoint.path / "manifest.json").unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        inspect(checkpoint.path)


def test_the_script(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, TOOL, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: {tmp_path} is no complete checkpoint (step_NNNNNNNN with a manifest.json) and holds none\n"
    )
