"""The job script, executed by bash with stand-ins for Slurm's commands and torchrun."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from depthbench.errors import UserError
from depthbench.slurm.command import write_submission
from depthbench.slurm.job import port
from depthbench.slurm.script import Job, render
from depthbench.slurm.settings import Container, Runtime, SlurmSettings
from tests.corpora import Corpus, trainable_run
from tests.slurm.stubs import HOSTILE, Stubs, directives

NOWHERE = Corpus("tokenizer", "train", "valid")
PATIENCE = 60  # seconds until a test gives up


def submission(
    stubs: Stubs,
    folder: Path,
    settings: SlurmSettings | None = None,
    name: str = "tiny",
    nodes: int = 2,
) -> Path:
    """The path of the script of a run in `folder`."""
    job = Job(name, folder, folder / "slurm" / "1", stubs.python, nodes, 4, last_step=20, steps=20, max_requeues=5)
    write_submission(job, replace(trainable_run(NOWHERE, folder), name=name), render(job, settings or SlurmSettings()))
    return job.submission / "submit.sbatch"


def log(folder: Path, attempt: str = "4711.0") -> str:
    return (folder / "slurm" / "logs" / attempt / "batch.log").read_text()


def wait_for(there: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


@pytest.mark.parametrize("nodes", [1, 3])
def test_one_launcher_a_node_and_one_address(stubs: Stubs, tmp_path: Path, nodes: int) -> None:
    script = submission(stubs, tmp_path / "run", nodes=nodes)
    assert stubs.run(script, nodes) == 0
    launchers = stubs.launchers()
    assert len(launchers) == nodes
    for node, words in enumerate(launchers):
        assert f"--nnodes={nodes}" in words and f"--node-rank={node}" in words and "--nproc-per-node=4" in words
        assert "--master-addr=first" in words and f"--master-port={port(4711, 0)}" in words
        assert "--max-restarts=0" in words and f"cwd={script.parent / 'code'}" in words
        assert words[-5:-1] == ["-m", "depthbench", "train", str(script.parent / "run.yaml")]
        assert (tmp_path / "run" / "slurm" / "logs" / "4711.0" / f"node-{node}.log").is_file()


def test_an_attempt_after_a_requeue_meets_elsewhere(stubs: Stubs, tmp_path: Path) -> None:
    """Its own logs, and a port that no survivor of the attempt before holds."""
    script = submission(stubs, tmp_path / "run")
    assert stubs.run(script, SLURM_RESTART_COUNT="1") == 0
    assert all(f"--master-port={port(4711, 1)}" in words for words in stubs.launchers())
    assert "attempt 4711.1: begins from step 0 of 20" in log(tmp_path / "run", "4711.1")
    assert (tmp_path / "run" / "attempt").read_text() == "4711.1"


def test_without_scontrol_nothing_starts(stubs: Stubs, tmp_path: Path) -> None:
    script = submission(stubs, tmp_path / "run")
    (stubs.bin / "scontrol").unlink()
    assert stubs.run(script) == 1
    assert "job 4711: scontrol is not on PATH, so the head node cannot be found" in log(tmp_path / "run")
    assert not stubs.launchers()


@pytest.mark.parametrize(("answer", "said"), [("exit 1", "does not know the nodes"), ("true", "names no node in")])
def test_without_a_head_node_nothing_starts(
    stubs: Stubs,
    tmp_path: Path,
    answer: str,
    said: str,
) -> None:
    script = submission(stubs, tmp_path / "run")
    (stubs.bin / "scontrol").write_text(f"#!{stubs.bin / 'bash'}\n{answer}\n")
    assert stubs.run(script) == 1
    assert said in log(tmp_path / "run") and not stubs.launchers()


def test_outside_slurm_it_says_so(stubs: Stubs, tmp_path: Path) -> None:
    assert stubs.run(submission(stubs, tmp_path / "run"), SLURM_JOB_ID="") != 0
    assert not stubs.launchers()


def stopped(attempt: str) -> str:
    return json.dumps({"state": "stopped", "step": 10, "reason": "SIGUSR1", "attempt": attempt})


@pytest.mark.parametrize(
    ("array", "number"), [({}, "4711"), ({"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"}, "4711_2")]
)
def test_a_warning_reaches_the_processes_and_requeues(
    stubs: Stubs, tmp_path: Path, array: dict[str, str], number: str
) -> None:
    """The batch shell gets it, and passes it on while it waits for them. In an array, whose last task has the array's
    number, to its own alone."""
    folder = tmp_path / "run"
    batch = stubs.start(
        submission(stubs, folder),
        2,
        WAIT_FOR=str(stubs.notes / "scancel"),
        STATUS=stopped(f"{number}.0"),
        STATUS_FILE=str(folder / "status.json"),
        **array,
    )
    wait_for(lambda: len(stubs.launchers()) == 2, "launchers")
    batch.send_signal(signal.SIGUSR1)
    batch.wait(timeout=PATIENCE)
    assert stubs.words("scancel") == ["--signal=USR1", number]
    assert stubs.words("requeue") == ["requeue", number]
    assert "stopped at step 10 (SIGUSR1); the next attempt resumes from step 0" in log(folder, f"{number}.0")
    assert f"--master-port={port(4711, 0)}" in stubs.launchers()[0]


def test_a_finished_run_starts_nothing(stubs: Stubs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = submission(stubs, folder)
    (folder / "checkpoints" / "step_00000020").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000020" / "manifest.json").write_text("{}")
    assert stubs.run(script) == 0
    assert not stubs.launchers() and "nothing to do" in log(folder)


def test_hostile_names_reach_the_job_unharmed(stubs: Stubs, tmp_path: Path) -> None:
    """As run folder, run name and value of the environment; nothing of them is executed or taken for an option."""
    folder = tmp_path / HOSTILE.replace("/", "")
    settings = SlurmSettings(environment={"HOSTILE": HOSTILE}, interface=HOSTILE)
    script = submission(stubs, folder, settings, name=HOSTILE)
    assert directives(script)[1:] == directives(submission(stubs, tmp_path / "plain"))[1:]
    (stubs.bin / "python").write_text(
        (stubs.bin / "python").read_text().replace('"cwd=', '"$HOSTILE" "$NCCL_SOCKET_IFNAME" "cwd=')
    )
    assert stubs.run(script) == 0
    for words in stubs.launchers():
        assert words[-4:] == [str(script.parent / "run.yaml"), HOSTILE, HOSTILE, f"cwd={script.parent / 'code'}"]
    assert not list(tmp_path.rglob("pwned")) and not Path("/pwned").exists()
    assert (folder / "attempt").read_text() == "4711.0"


def test_no_setting_of_the_run_is_in_the_script(stubs: Stubs, tmp_path: Path) -> None:
    job = Job("tiny", tmp_path, tmp_path / "1", stubs.python, 2, 4, 20, 20, 5)
    assert HOSTILE.split("\n")[0] not in render(replace(job, name=HOSTILE), SlurmSettings())


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition": "gpu; rm"},
        {"partition": "a\nb"},
        {"options": ["--comment=a b"]},
        {"options": ["-N 99"]},
        {"options": ["--comment='x'"]},
        {"time_limit": "soon"},
        {"environment": {"A B": "x"}},
        {"environment": {"A": "x\0y"}},
        {"warning_seconds": 0},
        {"time_limit": "10"},  # the default warning's ten minutes
        {"time_limit": "10:00"},
        {"time_limit": "0:10:00"},
        {"time_limit": "0-0:10"},
        {"time_limit": "1-0", "warning_seconds": 24 * 3600},
        {"time_limit": "1-1:01:01", "warning_seconds": 25 * 3600 + 61},
    ],
)
def test_what_sbatch_would_misread_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"slurm\."):
        SlurmSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("time_limit", ["11", "10:01", "0:10:01", "0-1", "0-0:11", "0-0:10:01", "0"])
def test_a_limit_that_leaves_time_before_the_warning_is_taken(time_limit: str) -> None:
    assert SlurmSettings(time_limit=time_limit).time_limit == time_limit


def test_apptainer_runs_the_launcher_inside(stubs: Stubs, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    container = Container(Runtime.APPTAINER, "image.sif", python=stubs.python, mounts=["/data sets:/data"])
    assert stubs.run(submission(stubs, folder, SlurmSettings(container=container))) == 0
    assert len(stubs.launchers()) == 2
    words = stubs.words("apptainer")
    expected = ["exec", "--nv", "--bind", f"{folder}:{folder}", "--bind", "/data sets:/data", "image.sif", "bash"]
    assert words[: len(expected)] == expected


def test_pyxis_takes_the_container_from_srun(stubs: Stubs, tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    container = Container(Runtime.PYXIS, "registry#image:1", python=stubs.python, mounts=["/data sets:/data"])
    assert stubs.run(submission(stubs, folder, SlurmSettings(container=container))) == 0
    words = stubs.words("srun")
    assert "--container-image=registry#image:1" in words
    assert f"--container-mounts={folder}:{folder},/data sets:/data" in words


@pytest.mark.parametrize("character", [":", ","])
def test_a_folder_that_no_container_can_mount_is_refused(tmp_path: Path, character: str) -> None:
    folder = tmp_path / f"a{character}b"
    job = Job("tiny", folder, folder / "1", "python", 1, 1, 20, 20, 5)
    with pytest.raises(UserError, match="a container cannot mount"):
        render(job, SlurmSettings(container=Container(Runtime.PYXIS, "image")))


def test_the_job_runs_the_code_of_its_submission(stubs: Stubs, tmp_path: Path) -> None:
    """And knows its commit."""
    code = submission(stubs, tmp_path / "run").parent / "code"
    assert (code / "depthbench" / "training" / "trainer.py").is_file()
    assert set(json.loads((code / "snapshot.json").read_text())) == {"commit", "uncommitted_changes"}
    assert not list(code.rglob("__pycache__")) and os.access(code, os.R_OK)
