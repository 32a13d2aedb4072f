"""The job script, executed by bash with stand-ins for Slurm's commands and torchrun."""

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from depthbench.errors import UserError
from depthbench.parallel import startup
from depthbench.parallel.startup import TIMEOUT_VARIABLE
from depthbench.slurm.command import write_submission
from depthbench.slurm.job import port
from depthbench.slurm.script import TEMPLATES, Job, render
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
    python: str | None = None,
) -> Path:
    """The path of the script of a run in `folder`."""
    submitting, inside = python or stubs.python, folder / "slurm" / "1"
    job = Job(name, folder, inside, submitting, nodes, 4, last_step=20, steps=20, max_requeues=5)
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


def test_a_job_at_its_time_limit_does_not_wait_for_its_processes(stubs: Stubs, tmp_path: Path) -> None:
    """At the time limit, after which Slurm kills the script with them: it decides before that."""
    folder, over = tmp_path / "run", tmp_path / "over"
    ending = "JobState=COMPLETING Reason=TimeLimit"
    batch = stubs.start(submission(stubs, folder), 2, WAIT_FOR=str(over), JOB=ending)
    wait_for(lambda: len(stubs.launchers()) == 2, "launchers")
    batch.send_signal(signal.SIGTERM)
    batch.wait(timeout=PATIENCE)
    over.touch()
    assert stubs.words("requeue") == ["requeue", "4711"]
    assert "the time limit came before a checkpoint was complete" in log(folder)


def test_a_signal_alone_ends_nothing(stubs: Stubs, tmp_path: Path) -> None:
    """A job that runs on waits for its processes, however long they need to save."""
    folder, over = tmp_path / "run", tmp_path / "over"
    batch = stubs.start(submission(stubs, folder), 2, WAIT_FOR=str(over))
    wait_for(lambda: len(stubs.launchers()) == 2, "launchers")
    batch.send_signal(signal.SIGTERM)
    wait_for((stubs.notes / "job").exists, "the question how the job is")
    over.touch()
    assert batch.wait(timeout=PATIENCE) == 0
    assert "finished at step 0" in log(folder)


@pytest.mark.parametrize("there", [True, False])
def test_a_node_without_the_run_folder_says_so(stubs: Stubs, tmp_path: Path, there: bool) -> None:
    """Where sbatch was called, or else in /tmp of the node: there is no log, and Slurm's own output is /dev/null."""
    folder, called = tmp_path / "run", tmp_path / "called"
    script = submission(stubs, folder).rename(tmp_path / "script")  # Slurm has a copy of it
    called.mkdir()
    folder.rename(tmp_path / "elsewhere")
    folder.touch()
    number = str(10**9 + os.getpid())
    here = called if there else Path("/tmp")
    code = stubs.run(script, SLURM_JOB_ID=number, SLURM_SUBMIT_DIR=str(called if there else folder))
    said = here / f"depthbench-{number}.log"
    text = said.read_text()
    said.unlink()
    assert code == 1 and not stubs.launchers()
    assert text.startswith(f"depthbench: job {number} on ") and f"{folder}/slurm" in text


def test_a_finished_run_starts_nothing(stubs: Stubs, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    script = submission(stubs, folder)
    (folder / "checkpoints" / "step_00000020").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000020" / "manifest.json").write_text("{}")
    assert stubs.run(script) == 0
    assert not stubs.launchers() and "nothing to do" in log(folder)


def noting(stubs: Stubs, *names: str) -> None:
    """Have torchrun's stand-in note these variables too, after its arguments."""
    python = Path(stubs.python)
    python.write_text(python.read_text().replace('"cwd=', " ".join(f'"${name}"' for name in names) + ' "cwd='))


def hostile_python(stubs: Stubs) -> str:
    link = stubs.bin / HOSTILE.replace("/", "")
    link.symlink_to(stubs.python)
    return str(link)


def test_hostile_names_reach_the_job_unharmed(stubs: Stubs, tmp_path: Path) -> None:
    """As run folder, run name, value of the environment and path of the Python that submits; nothing of them is
    executed or taken for an option."""
    folder = tmp_path / HOSTILE.replace("/", "")
    settings = SlurmSettings(environment={"HOSTILE": HOSTILE}, interface=HOSTILE)
    script = submission(stubs, folder, settings, name=HOSTILE, python=hostile_python(stubs))
    assert directives(script)[1:] == directives(submission(stubs, tmp_path / "plain"))[1:]
    noting(stubs, "HOSTILE", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    assert stubs.run(script) == 0
    for words in stubs.launchers():
        assert words[-5:] == [str(script.parent / "run.yaml"), *[HOSTILE] * 3, f"cwd={script.parent / 'code'}"]
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


@pytest.mark.parametrize("runtime", list(Runtime))
def test_hostile_names_reach_a_container_unharmed(stubs: Stubs, tmp_path: Path, runtime: Runtime) -> None:
    """As image, as path of its Python, and as mount where that can be."""
    folder, python = tmp_path / "run", hostile_python(stubs)
    mount = HOSTILE.replace(",", "") if runtime is Runtime.APPTAINER else re.sub(r"[,\s]", "", HOSTILE)
    container = Container(runtime, HOSTILE, python=python, mounts=[f"/{mount}:/{mount}"])
    assert stubs.run(submission(stubs, folder, SlurmSettings(container=container))) == 0
    if runtime is Runtime.APPTAINER:
        binds = ["--bind", f"{folder}:{folder}", "--bind", f"/{mount}:/{mount}"]
        assert stubs.words("apptainer")[:8] == ["exec", "--nv", *binds, HOSTILE, "bash"]
    else:
        words = stubs.words("srun")
        assert f"--container-image={HOSTILE}" in words
        assert f"--container-mounts={folder}:{folder},/{mount}:/{mount}" in words
    assert len(stubs.launchers()) == 2
    assert not list(tmp_path.rglob("pwned")) and not Path("/pwned").exists()


def test_the_clusters_timeout_reaches_the_processes(
    stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And process groups are made with it."""
    noting(stubs, TIMEOUT_VARIABLE)
    assert stubs.run(submission(stubs, tmp_path / "run", SlurmSettings(timeout_seconds=90.5))) == 0
    for words in stubs.launchers():
        assert words[-2] == "90.5"
        monkeypatch.setenv(TIMEOUT_VARIABLE, words[-2])
    found: list[timedelta] = []

    def join(backend: str, *, timeout: timedelta, **_: object) -> None:
        found.append(timeout)
        raise ConnectionError

    monkeypatch.setattr("torch.distributed.init_process_group", join)
    with pytest.raises(ConnectionError):
        startup.start(trainable_run(NOWHERE, tmp_path))
    assert found == [timedelta(seconds=90.5)]


def test_pyxis_takes_the_container_from_srun(stubs: Stubs, tmp_path: Path) -> None:
    """And the environment that the cluster's file and the script set, which an image's would else go before."""
    folder = tmp_path / "run"
    container = Container(Runtime.PYXIS, "registry#image:1", python=stubs.python, mounts=["/sets:/data"])
    settings = SlurmSettings(container=container, environment={"NCCL_IB_HCA": "mlx5"}, interface="ib0")
    assert stubs.run(submission(stubs, folder, settings)) == 0
    words = stubs.words("srun")
    assert "--container-image=registry#image:1" in words
    assert f"--container-mounts={folder}:{folder},/sets:/data" in words
    (names,) = [word.partition("=")[2].split(",") for word in words if word.startswith("--container-env=")]
    exported = re.findall(r"^export (.*)$", (TEMPLATES / "batch.sh").read_text(), re.MULTILINE)
    ours = [word.partition("=")[0] for line in exported for word in line.partition(" #")[0].split()]
    cluster = ["DEPTHBENCH_TIMEOUT_SECONDS", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"]
    assert sorted(names) == sorted([*cluster, *ours]) and "DEPTHBENCH_ATTEMPT" in ours


@pytest.mark.parametrize("blank", [" ", "\t", "\n"])
def test_pyxis_is_given_no_path_with_blanks(tmp_path: Path, blank: str) -> None:
    """It writes mounts into lines of an fstab, which blanks divide."""
    with pytest.raises(UserError, match=r"slurm\.container\.mounts has .*Pyxis cannot mount a path with blanks"):
        Container(Runtime.PYXIS, "image", mounts=[f"/data{blank}sets:/data"])
    job = Job("tiny", tmp_path / f"a{blank}run", tmp_path / "1", "python", 1, 1, 20, 20, 5)
    with pytest.raises(UserError, match=r"run folder .*Pyxis cannot mount a path with blanks"):
        render(job, SlurmSettings(container=Container(Runtime.PYXIS, "image")))


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
