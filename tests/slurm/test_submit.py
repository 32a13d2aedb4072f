"""`depthbench submit`: what it refuses, what it writes, what it prints."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from depthbench.cli import main
from depthbench.config.load import plain, read_yaml, typed
from depthbench.errors import UserError
from depthbench.logs.overview import read_state
from depthbench.planning.cluster import CLUSTERS, load_cluster
from depthbench.slurm.command import absolute, write_settings, write_submission
from depthbench.slurm.placement import partition_nodes
from depthbench.slurm.script import Job, render
from depthbench.slurm.settings import SlurmSettings, load_slurm
from tests.corpora import Corpus, snapshot, trainable_run
from tests.slurm.stubs import HOSTILE

NOWHERE = Corpus("tokenizer", "train", "valid")
SINFO = "printf 'gpu* 2\\nlong 40\\n'"
SBATCH = "printf '%s\\n' \"$@\" > \"$NOTES/queued\"; echo '4711;mine'"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, with a Slurm whose default partition has two nodes; sbatch notes its arguments."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, text in (("sinfo", SINFO), ("sbatch", SBATCH)):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("NOTES", str(folder))
    return folder


def run_file(corpus: Corpus, folder: Path, **sections: Any) -> str:
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(plain(trainable_run(corpus, folder / "run", **sections))))
    return str(path)


def submitted(*words: str, cluster: str = "local-slurm") -> int:
    return main(["submit", *words, "--cluster", cluster])


def test_a_submission_is_complete(
    corpus: Corpus, tmp_path: Path, commands: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script, the resolved settings with absolute paths, the code; a second one lies beside it."""
    file = run_file(corpus, tmp_path)
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        assert (
            submitted(
                file, "run_dir=run", "train.steps=7", "train.global_batch=8", "--nodes", "2", "--max-requeues", "3"
            )
            == 0
        )
        folder = tmp_path / "run" / "slurm" / str(number)
        assert (commands / "queued").read_text().split() == ["--parsable", str(folder / "submit.sbatch")]
        said = capsys.readouterr().out
        assert f"submitted job 4711: {folder}/submit.sbatch" in said and f"{tmp_path}/run/slurm/logs/4711.0" in said
        script = (folder / "submit.sbatch").read_text()
        assert "#SBATCH --nodes=2\n" in script and "\nlast_step=7\n" in script and "\nmax_requeues=3\n" in script
        written = typed(read_yaml(folder / "run.yaml"))
        assert written.folder == str(tmp_path / "run") and written.train.steps == 7
        assert (folder / "node.sh").is_file() and (folder / "code" / "depthbench" / "cli.py").is_file()


def test_a_dry_run_shows_all_and_does_nothing(
    corpus: Corpus, tmp_path: Path, commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_file(corpus, tmp_path)
    before = snapshot(tmp_path)
    assert submitted(file, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=1" in said and "scancel --signal=USR1" in said and "tokens a second" in said
    assert snapshot(tmp_path) == before


def test_a_dry_run_needs_no_slurm(
    corpus: Corpus, tmp_path: Path, commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (commands / "sinfo").unlink()
    assert submitted(run_file(corpus, tmp_path), "--dry-run") == 0
    assert "could not be submitted from here: sinfo is not on PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "cluster", "message"),
    [
        ([], "local-slrm", "no 'local-slrm' in launch/clusters; nearest is 'local-slurm'"),
        (
            ["train.global_batch=12", "--nodes", "3"],
            "local-slurm",
            "3 nodes asked for, partition gpu has 2: set --nodes=2 or fewer",
        ),
        (["--nodes", "0"], "local-slurm", "--nodes=0 must be at least 1"),
        (
            ["parallel.tensor=4", "model.num_attention_heads=4"],
            "local-slurm",
            "parallel.tensor=4 is more than the 2 GPUs of a node",
        ),
        (
            ["parallel.tensor=3", "model.num_attention_heads=3", "model.hidden_size=48"],
            "a100-80gb",
            "parallel.tensor=3 does not divide a node's 8 GPUs, and ranks that share matmuls have to lie inside one; "
            "set it to one of 1, 2, 4, 8",
        ),
        (
            ["parallel.pipeline=4", "model.num_layers=4", "train.global_batch=16", "--nodes", "1"],
            "local-slurm",
            "2 processes cannot hold parallel.tensor=1 x parallel.pipeline=4 = 4 ranks a model copy",
        ),
        (["train.global_batch=6"], "local-slurm", "train.global_batch=6 is not a multiple of"),
        (
            ["model.hidden_size=4096", "model.ffn_hidden_size=16384"],
            "local-slurm",
            "GiB, each CPU has 2: lower train.micro_batch=2",
        ),
        (["--max-requeues", "-1"], "local-slurm", "--max-requeues=-1 must be at least 0"),
        (["--time", "soon"], "local-slurm", "slurm.time_limit='soon'"),
        (["--time", "1"], "local-slurm", "slurm.time_limit=1 (--time) is 60 s, and the run would be told to save "),
        (["data.tokenizer=nowhere.model"], "local-slurm", "nowhere.model"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_queued(
    corpus: Corpus,
    tmp_path: Path,
    commands: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    cluster: str,
    message: str,
) -> None:
    assert submitted(run_file(corpus, tmp_path), *words, cluster=cluster) == 2
    assert message in capsys.readouterr().err
    assert not (commands / "queued").exists() and not (tmp_path / "run" / "slurm").exists()


def test_a_partition_is_asked_of_slurm(commands: Path) -> None:
    assert partition_nodes(None) == ("gpu", 2) and partition_nodes("long") == ("long", 40)
    with pytest.raises(UserError, match=r"no partition 'short'; there are gpu, long"):
        partition_nodes("short")
    (commands / "sinfo").write_text("#!/bin/bash\necho down >&2; exit 1\n")
    with pytest.raises(UserError, match=r"sinfo failed.*down"):
        partition_nodes(None)


def test_what_slurm_refuses_is_told(
    corpus: Corpus, tmp_path: Path, commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (commands / "sbatch").write_text("#!/bin/bash\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    assert submitted(run_file(corpus, tmp_path)) == 2
    assert "Slurm refused the job: sbatch: error: Invalid account" in capsys.readouterr().err
    state = read_state(tmp_path / "run")
    assert (state.state, state.reason) == ("refused", "sbatch: error: Invalid account")


@pytest.mark.parametrize("name", ["a\x00b", "\udcff", "x" * 300])
def test_a_folder_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    run = trainable_run(NOWHERE, tmp_path / name)
    job = Job("x", tmp_path / name, tmp_path / name / "slurm" / "1", "python", 1, 1, 4, 4, 5)
    with pytest.raises(UserError, match="cannot write the submission"):
        write_submission(job, run, render(job, SlurmSettings()))


VALUES = [
    *("a\x00b", "\udcff", "1e5", "yes", "null", "- x", "a: b", "'", '"', " x ", "a\nb\n", "\t", "%x", "ü\u2028"),
    HOSTILE,
]


@pytest.mark.parametrize("value", VALUES)
def test_any_value_arrives_as_it_was(tmp_path: Path, value: str) -> None:
    """As the run's name, and as each of its paths."""
    run = trainable_run(
        Corpus(value, value, value), Path(value), name=value, initial=value, data={"index_cache": value}
    )
    write_settings(tmp_path / "run.yaml", run)
    assert typed(read_yaml(tmp_path / "run.yaml")) == run


def test_all_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = trainable_run(
        Corpus("t/model", "t/train", "/t/valid"), Path("out"), data={"index_cache": "cache"}, initial="start"
    )
    found = absolute(run)
    assert (found.folder, found.data.tokenizer) == (f"{tmp_path}/out", f"{tmp_path}/t/model")
    assert (found.data.train[0].prefix, found.data.valid[0].prefix) == (f"{tmp_path}/t/train", "/t/valid")
    assert (found.data.index_cache, found.initial) == (f"{tmp_path}/cache", f"{tmp_path}/start")
    assert os.path.isabs(found.folder)


@pytest.mark.parametrize("name", sorted(file.stem for file in CLUSTERS.glob("*.yaml")))
def test_every_shipped_cluster_takes_jobs(name: str) -> None:
    assert load_slurm(name).warning_seconds > 0 and load_cluster(name).gpus_per_node > 1


def test_a_cluster_without_slurm_is_named(tmp_path: Path) -> None:
    text = (CLUSTERS / "local-slurm.yaml").read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text[: text.index("slurm:")])
    with pytest.raises(UserError, match=r"mine\.yaml does not say how jobs are submitted: add a section slurm"):
        load_slurm(str(file))
    file.write_text(text.replace("interface:", "interfaces:"))
    with pytest.raises(UserError, match=r"unknown key slurm\.interfaces; nearest is interface"):
        load_slurm(str(file))
