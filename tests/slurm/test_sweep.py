"""Sweeps: every combination once, and an array that starts each run's own script."""

from pathlib import Path

import pytest
import yaml

from depthbench.cli import main
from depthbench.config.load import load_run, parse_overrides, plain
from depthbench.errors import UserError
from depthbench.logs.overview import read_state, run_folders
from depthbench.paths import CONFIGS
from depthbench.planning.cluster import CLUSTERS
from depthbench.slurm.sweep import Sweep, assignment, load_sweep, members
from tests.corpora import Corpus, snapshot, trainable_run
from tests.slurm.stubs import HOSTILE, Stubs, directives


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


@pytest.fixture
def sbatch(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    """Stand-ins on PATH, with one for sbatch that notes which script it was given."""
    for name, text in (("sinfo", "echo 'gpu* 2'"), ("sbatch", 'printf %s "$2" > "$NOTES/queued"; echo 9')):
        (stubs.bin / name).write_text(f"#!{stubs.bin / 'bash'}\n{text}\n")
        (stubs.bin / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(stubs.bin))
    monkeypatch.setenv("NOTES", str(stubs.notes))
    monkeypatch.setattr("sys.executable", stubs.python)
    return stubs


def submitted(corpus: Corpus, folder: Path, grid: str, *words: str, cluster: str = "local-slurm") -> int:
    given, sweep = folder / "given.yaml", folder / "seeds.yaml"
    given.write_text(yaml.safe_dump(plain(trainable_run(corpus, folder / "unused"))))
    sweep.write_text(f"limit: 1\ngrid: {grid}\n")
    return main(["submit", str(given), *words, "--cluster", cluster, "--array", str(sweep)])


def test_an_array_starts_each_runs_own_script(
    corpus: Corpus,
    tmp_path: Path,
    sbatch: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In its own folder, as an attempt of its own. The array has the sweep's name."""
    stubs = sbatch
    monkeypatch.chdir(tmp_path)
    assert submitted(corpus, tmp_path, "{seed: [1, 2, 3]}") == 0
    script = Path((stubs.notes / "queued").read_text())
    first, *options, array = directives(script)
    assert (first, array) == ("#SBATCH --job-name=seeds", "#SBATCH --array=0-2%1")
    assert options == directives(tmp_path / "runs/seeds/1/slurm/1/submit.sbatch")[1:]
    assert f"3 runs, 1 at a time, in {tmp_path}/runs/seeds" in capsys.readouterr().out
    assert stubs.run(script, 1, SLURM_ARRAY_JOB_ID="4710", SLURM_ARRAY_TASK_ID="1") == 0
    (words,) = stubs.launchers()
    assert str(tmp_path / "runs/seeds/2/slurm/1/run.yaml") in words
    assert (tmp_path / "runs" / "seeds" / "2" / "attempt").read_text() == "4710_1.0"
    assert not (tmp_path / "runs" / "seeds" / "1" / "attempt").exists()


def test_hostile_names_reach_an_array_unharmed(
    corpus: Corpus, tmp_path: Path, sbatch: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the path of the run folders and in a variable, with lines that look like options of sbatch."""
    folder, cluster = tmp_path / (HOSTILE.replace("/", "") + "😀"), tmp_path / "cluster.yaml"
    values = yaml.safe_load((CLUSTERS / "local-slurm.yaml").read_text())
    values["slurm"]["environment"] = {"HOSTILE": HOSTILE}
    cluster.write_text(yaml.safe_dump(values))
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert submitted(corpus, tmp_path, "{seed: [1, 2]}", cluster=str(cluster)) == 0
    script = Path((sbatch.notes / "queued").read_text())
    assert script.parent == folder / "runs" / "seeds"
    assert not any("99" in line for line in directives(script))
    assert sbatch.run(script, 1, SLURM_ARRAY_JOB_ID="4710", SLURM_ARRAY_TASK_ID="1") == 0
    (words,) = sbatch.launchers()
    assert str(folder / "runs/seeds/2/slurm/1/run.yaml") in words
    assert not list(tmp_path.rglob("pwned")) and not Path("/pwned").exists()


def test_a_node_without_a_runs_script_says_so(
    corpus: Corpus, tmp_path: Path, sbatch: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sbatch was called, for each task."""
    monkeypatch.chdir(tmp_path)
    assert submitted(corpus, tmp_path, "{seed: [1, 2]}") == 0
    missing = tmp_path / "runs/seeds/2/slurm/1/submit.sbatch"
    missing.unlink()
    task = {"SLURM_ARRAY_JOB_ID": "4710", "SLURM_ARRAY_TASK_ID": "1", "SLURM_SUBMIT_DIR": str(tmp_path)}
    assert sbatch.run(Path((sbatch.notes / "queued").read_text()), 1, **task) == 1
    assert f"cannot read {missing}" in (tmp_path / "depthbench-4710_1.log").read_text()


@pytest.mark.parametrize("name", sorted(file.stem for file in (CONFIGS / "sweeps").glob("*.yaml")))
def test_a_dry_run_shows_what_a_shipped_sweep_would_submit(
    name: str, tmp_path: Path, sbatch: Stubs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every run fits the cluster. The array's script and the first run's, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    words = ["submit", "depthbench_400m", "--cluster", "a100-80gb", "--array", name, "--dry-run"]
    assert main(words) == 0
    _, sweep = load_sweep(name)
    first, *_, last = runs = list(members(sweep))
    said = capsys.readouterr().out
    assert all(f"{name}-{run}: " in said for run in runs)
    assert f"#SBATCH --array=0-{len(runs) - 1}%{sweep.limit}\n" in said
    assert all(f"{tmp_path}/runs/{name}/{run}/slurm/1/submit.sbatch" in said for run in (first, last))
    assert f"\nrun_folder={tmp_path}/runs/{name}/{first}\n" in said
    assert snapshot(tmp_path) == before and not (sbatch.notes / "queued").exists()


def test_every_run_of_a_refused_array_is_refused(
    corpus: Corpus, tmp_path: Path, sbatch: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (sbatch.bin / "sbatch").write_text(f"#!{sbatch.bin / 'bash'}\necho 'Invalid account' >&2; exit 1\n")
    assert submitted(corpus, tmp_path, "{seed: [1, 2]}") == 2
    states = [read_state(folder) for folder in run_folders(tmp_path / "runs")]
    assert [(state.state, state.reason) for state in states] == [("refused", "Invalid account")] * 2


@pytest.mark.parametrize(
    ("grid", "words", "key"),
    [
        ("{seed: [1, 2]}", ["run_dir=mine"], "run_dir"),
        ("{seed: [1, 2]}", ["name=mine"], "name"),
        ("{name: [a, b]}", [], "name"),
    ],
)
def test_names_and_folders_are_the_sweeps(
    corpus: Corpus,
    tmp_path: Path,
    sbatch: Stubs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    grid: str,
    words: list[str],
    key: str,
) -> None:
    """One of the user's own would be lost without a word."""
    monkeypatch.chdir(tmp_path)
    assert submitted(corpus, tmp_path, grid, *words) == 2
    assert f"{key}=... cannot be set with --array" in capsys.readouterr().err
    assert not (sbatch.notes / "queued").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", ["plain", "a: 'b' \"c\"\n #d", "x" * 300 + " y", "\x7f\x85\u2028ü😀", " null "])
def test_an_override_says_any_text(text: str) -> None:
    assert parse_overrides([assignment("name", text)]) == ({}, {"name": text})
