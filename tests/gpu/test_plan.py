"""The GPU script without a GPU: its plan is complete, every command of it would start, and its data is data."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from depthbench.config.load import load_run
from depthbench.residual import Residual
from depthbench.training.preflight import preflight
from tests.corpora import snapshot

from . import checks, prefill
from .data import write_data
from .run import FULL, RESUME, TINY, Report, Row, main, markdown, plan, resume_words, short_run_words


def test_without_a_gpu_nothing_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert main(["--output", str(tmp_path)]) == 0
    assert "no NVIDIA GPU" in capsys.readouterr().out
    assert snapshot(tmp_path) == {}


def test_the_plan_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cpu-rehearsal", "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "checks of one process",
        "checks of two processes",
        *["resume"] * 3,
        "profile",
        *(f"run of {name}" for name in sorted(Residual.registry)),
    ]
    assert not any("two processes" in what for what, _ in plan(FULL, Path("x"), 1))


def test_reading_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--prefill", "--cpu-rehearsal", "--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 * 4 and lines[1] == "1600m_L28 block_attnres: 1 x 1,024 in chunks of 128"
    words = [(part.run, [f"model={part.shape}", f"residual={part.architecture}"]) for part in prefill.parts()]
    assert all(load_run(*each).model.num_layers > 15 for each in words)


def test_no_script_needs_matplotlib() -> None:
    """Nor does `run.sh` look for it."""
    code = "import sys; sys.modules['matplotlib'] = None; import tests.gpu.run"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_architecture_is_checked() -> None:
    for listed in (checks.single(), checks.layouts()):
        assert {name.rpartition("/")[2] for name, _ in listed} >= set(Residual.registry)


@pytest.mark.parametrize("architecture", sorted(Residual.registry))
def test_short_runs_would_start(architecture: str, tmp_path: Path) -> None:
    """The rehearsal's on its data; the full one's settings are the recipe's but for what shortens it."""
    write_data(tmp_path, TINY.vocab, TINY.tokens)
    run = load_run("depthbench_400m", short_run_words(TINY, tmp_path, architecture))
    ready = preflight(run, 1, first_of_node=True)
    assert ready.last_step == TINY.steps
    full = load_run("depthbench_400m", short_run_words(FULL, tmp_path, architecture))
    recipe = load_run("depthbench_400m", [f"residual={architecture}"])
    assert (full.model, full.residual, full.parallel, full.optimizer) == (
        recipe.model,
        recipe.residual,
        recipe.parallel,
        recipe.optimizer,
    )
    assert full.train.micro_batch == recipe.train.micro_batch
    assert full.train.global_batch % full.train.micro_batch == 0


def test_the_resume_check_would_start(tmp_path: Path) -> None:
    write_data(tmp_path, RESUME.vocab, RESUME.tokens)
    last = [
        preflight(load_run("depthbench_400m", words), 1, first_of_node=True).last_step
        for words in resume_words(tmp_path)
    ]
    assert last == [6, 3, 6]


def test_the_table_says_what_failed() -> None:
    rows = [Row("hc", 8, 1234.5, 0.412, 70.25, 68.0, 10.8, 9.5), Row("moda", error="exit 1")]
    found = [
        {"name": "parity/hc", "passed": True, "seconds": 1.0, "detail": ""},
        {"name": "parity/moda", "passed": False, "seconds": 1.0, "detail": "off by 1"},
    ]
    report = Report("NVIDIA H200", 1, "2.11", 200.0, found, rows)
    text = markdown(report)
    assert "| hc | 8 | 1,234 | 41.2% | 70.2 | 68.0 | 10.800 | 9.500 | 1 of 1 |" in text
    assert "| moda | 0 | - | - | - | - | - | - | 0 of 1, exit 1 |" in text
    assert "- failed: parity/moda: off by 1" in text
    assert not report.passed
