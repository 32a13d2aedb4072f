"""Sweeps: every combination once, and an array that starts each run's own script."""

from pathlib import Path

import pytest
import yaml

from depthbench.cli import main
from depthbench.config.load import load_run, plain
from depthbench.errors import UserError
from depthbench.paths import CONFIGS
from depthbench.slurm.sweep import Sweep, load_sweep, members
from tests.corpora import Corpus, trainable_run
from tests.slurm.stubs import Stubs


def test_every_combination_once() -> None:
    found = members(Sweep({"residual": ["hc", "keel"], "optimizer.lr": [5e-4, 1e-3]}, limit=2))
    assert list(found) == ["hc-0.0005", "hc-0.001", "keel-0.0005", "keel-0.001"]
    assert found["keel-0.001"] == ["residual=keel", "optimizer.lr=0.001"]


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONFIGS / "sweeps").glob("*.yaml")))
def test_every_run_of_a_shipped_sweep_loads(name: str) -> None:
    _, sweep = load_sweep(name)
    runs = [load_run("depthbench_400m", words) for words in members(sweep).values()]
    assert len({yaml.safe_dump(plain(run)) for run in runs}) == len(runs) >= 45


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "at least one key"),
        ({"seed": []}, "at least one value"),
        ({"name": ["a b", "a-b"]}, "share the run folder"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        members(Sweep(grid, 1))


def test_an_unknown_sweep_is_named() -> None:
    with pytest.raises(UserError, match="no 'architectures_40m' in configs/sweeps; nearest is 'architectures_400m'"):
        load_sweep("architectures_40m")


def test_an_array_starts_each_runs_own_script(
    corpus: Corpus,
    tmp_path: Path,
    stubs: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In its own folder, as an attempt of its own."""
    for name, text in (("sinfo", "echo 'gpu* 2'"), ("sbatch", 'printf %s "$2" > "$NOTES/queued"; echo 9')):
        (stubs.bin / name).write_text(f"#!{stubs.bin / 'bash'}\n{text}\n")
        (stubs.bin / name).chmod(0o755)
    given, sweep = tmp_path / "given.yaml", tmp_path / "seeds.yaml"
    given.write_text(yaml.safe_dump(plain(trainable_run(corpus, tmp_path / "unused"))))
    sweep.write_text("limit: 1\ngrid: {seed: [1, 2, 3]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(stubs.bin))
    monkeypatch.setenv("NOTES", str(stubs.notes))
    monkeypatch.setattr("sys.executable", stubs.python)
    assert main(["submit", str(given), "--cluster", "local-slurm", "--array", str(sweep)]) == 0
    script = Path((stubs.notes / "queued").read_text())
    assert "#SBATCH --array=0-2%1\n" in script.read_text()
    assert f"3 runs, 1 at a time, in {tmp_path}/runs/seeds" in capsys.readouterr().out
    assert stubs.run(script, 1, SLURM_ARRAY_JOB_ID="4710", SLURM_ARRAY_TASK_ID="1") == 0
    (words,) = stubs.launchers()
    assert str(tmp_path / "runs/seeds/2/slurm/1/run.yaml") in words
    assert (tmp_path / "runs" / "seeds" / "2" / "attempt").read_text() == "4710_1.0"
    assert not (tmp_path / "runs" / "seeds" / "1" / "attempt").exists()
