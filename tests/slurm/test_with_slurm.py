"""Jobs under a real Slurm: trained on several nodes, and hit by all that ends an attempt.

Each comes to the same losses, step by step, and to the same tensors as a run that nothing happened to.
"""

import contextlib
import io
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from depthbench.checkpoint.folder import latest
from depthbench.cli import main
from depthbench.config.load import plain
from depthbench.config.schema import RunConfig
from depthbench.slurm.attempts import Kind
from tests.corpora import Corpus, trainable_run
from tests.harness import run_workers
from tests.slurm.jobs import Submitted, sbatch, slurm, submit
from tests.training.test_resume import assert_same_run, exact, status, training

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

STEPS = 300
ROOT = Path(__file__).resolve().parents[2]


NODE: dict[str, Any] = {  # two data-parallel processes, which is a node
    "parallel": {"distributed_optimizer": True},
    "train": {"global_batch": 4, "micro_batch": 2},
}
PIPELINE: dict[str, Any] = {"parallel": {"pipeline": 2}, "train": {}}  # two stages, each on a node of its own


def run_of(corpus: Corpus, folder: Path, kind: dict[str, Any] = NODE) -> RunConfig:
    train = {"steps": STEPS, "eval_every": 0, **kind["train"]}
    return trainable_run(corpus, folder, parallel=kind["parallel"], train=train, checkpoint={"every": 20})


def uninterrupted(run: RunConfig) -> Path:
    """The folder of the run, made by two processes without a job."""
    run_workers(2, training, run)
    return Path(run.folder)


@contextmanager
def as_job(run: RunConfig, *words: str) -> Iterator[Submitted]:
    """The run as a job, past its first checkpoint."""
    job = submit(run, *words)
    job.wait_for_step(25)
    yield job
    slurm("scancel", "--quiet", job.number)


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted(run_of(corpus, tmp_path_factory.mktemp("whole")))


@pytest.fixture
def running(corpus: Corpus, tmp_path: Path) -> Iterator[Submitted]:
    with as_job(run_of(corpus, tmp_path / "run")) as job:
        yield job


@pytest.fixture(scope="module")
def whole_pipeline(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return uninterrupted(run_of(corpus, tmp_path_factory.mktemp("whole"), PIPELINE))


def two_nodes(folder: Path, **slurm_settings: Any) -> list[str]:
    """Options of submit: each stage on a node."""
    cluster = yaml.safe_load((ROOT / "launch/clusters/local-slurm.yaml").read_text())
    cluster["gpus_per_node"] = 1
    cluster["slurm"].update(slurm_settings)
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    return [str(file), "--nodes", "2"]


@pytest.fixture
def pipeline(corpus: Corpus, tmp_path: Path) -> Iterator[Submitted]:
    """A job of two nodes."""
    with as_job(run_of(corpus, tmp_path / "run", PIPELINE), *two_nodes(tmp_path)) as job:
        yield job


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def processes(job: Submitted) -> list[int]:
    """Ids of the job's launchers and ranks, and of what these have started."""
    ids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in ids if f"depthbench train {job.folder}" in command_of(pid)]


def ranks(job: Submitted) -> list[int]:
    """Ids of those that torchrun started."""

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    started = [pid for pid in processes(job) if "distributed.run" not in command_of(pid)]
    return [pid for pid in started if "distributed.run" in command_of(parent(pid))]


def script_and_all(job: Submitted) -> list[int]:
    """Ids of the job's script, first, and of all that it has started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SLURM_JOB_ID={job.number}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return sorted(found, key=lambda pid: "slurm_script" not in command_of(pid))


def of_node(job: Submitted, number: int) -> list[int]:
    """Ids of the ranks on one of the job's nodes."""

    def there(pid: int) -> bool:
        return f"SLURM_NODEID={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    return [pid for pid in ranks(job) if there(pid)]


@contextmanager
def held(pids: list[int]) -> Iterator[None]:
    """Processes that do nothing for a while, as on a machine that hangs. Some may have ended."""

    def send(number: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


def test_the_quickstart_over_two_and_four_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first steps, with pipeline and tensor parallelism: losses of two nodes are those of torchrun on one machine
    bit by bit, those of four, which sum over two data-parallel ranks more, within rounding. In folders whose names no
    shell should see."""
    monkeypatch.chdir(ROOT)  # where its data lies
    shorter = [
        *("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true", "train.precision=fp32"),
        *("train.global_batch=16", "train.micro_batch=4", "train.steps=8", "train.eval_every=4"),
        "train.eval_sequences=16",
    ]
    one = tmp_path / "one"
    launched = subprocess.run(
        ["bash", "launch/quickstart.sh", *shorter, f"run_dir={one}"],
        env={**os.environ, "PROCESSES": "4"},
        capture_output=True,
        text=True,
    )
    assert launched.returncode == 0, launched.stderr
    jobs = []
    for nodes in (2, 4):
        folder = tmp_path / f'it\'s {nodes}, "$(touch pwned)" nodes'
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            words = ["submit", "quickstart", *shorter, f"run_dir='{str(folder).replace(chr(39), chr(39) * 2)}'"]
            assert main([*words, "--cluster", "local-slurm", "--nodes", str(nodes)]) == 0
        jobs.append(Submitted(re.findall(r"submitted job (\d+)", said.getvalue())[0], folder))
    for job in jobs:
        job.finish()
        assert status(job.folder)["state"] == "finished"
    two, four = (job.folder for job in jobs)
    assert exact(two) == exact(one)
    for ours, theirs in zip(exact(four), exact(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(list((four / "slurm" / "logs").rglob("stdout.log"))) == 8


def test_a_time_limit_is_no_end(corpus: Corpus, tmp_path: Path, whole_pipeline: Path) -> None:
    """Slurm warns, the run saves, the job requeues itself and goes on. Time limits are whole minutes, so the processes
    are held until the warning comes, if it has not come while they were starting: it is repeated until they act."""
    options = [*two_nodes(tmp_path, warning_seconds=110), "--time", "2"]
    job = submit(run_of(corpus, tmp_path / "run", PIPELINE), *options)

    def warned() -> bool:
        return "asked to stop" in job.log()

    job.wait_for(lambda: job.step >= 1 or warned(), "a step")
    with held(ranks(job)):
        job.wait_for(warned, "Slurm's warning")
    job.wait_for(lambda: job.restarts == 1, "a requeue")
    slurm("scontrol", "update", f"job={job.number}", "TimeLimit=60")
    job.finish()
    first, *_, last = job.attempts()
    assert (first.kind, first.reason, last.kind) == (Kind.STOPPED, "SIGUSR1", Kind.FINISHED)
    assert 0 < first.step == first.saved < STEPS
    job.assert_each_resumed()
    assert_same_run(job.folder, whole_pipeline, STEPS)


def test_terminated_and_finished(pipeline: Submitted, whole_pipeline: Path) -> None:
    """SIGTERM to all processes of the job's step, torchrun among them. Then it is finished, and stays so. What the next
    attempt runs is the submission's copy of the code, not the checkout."""
    module = pipeline.folder / "slurm" / "1" / "code" / "depthbench" / "__init__.py"
    with open(module, "a") as file:
        file.write('import sys; print("copied code in", __file__, file=sys.stderr)\n')
    slurm("scancel", "--signal=TERM", pipeline.number)
    pipeline.finish()
    first, last = pipeline.attempts()
    logs = pipeline.folder / "slurm" / "logs"
    said = [(logs / one.attempt / "node-0.log").read_text().count(f"copied code in {module}") for one in (first, last)]
    assert said == [0, 1]
    assert (first.kind, first.reason, last.kind) == (Kind.STOPPED, "SIGTERM", Kind.FINISHED)
    pipeline.assert_each_resumed()
    assert_same_run(pipeline.folder, whole_pipeline, STEPS)

    again = sbatch(pipeline.folder / "slurm" / "1" / "submit.sbatch", pipeline.folder)
    again.finish()
    assert again.attempts() == [first, last] and "nothing to do" in again.log()


def test_preempted_and_requeued(pipeline: Submitted, whole_pipeline: Path) -> None:
    """A job of a partition that goes first takes all nodes: Slurm signals the run, which is held until then, and saves;
    it gives the nodes away. Afterwards the run goes on."""
    words = ["--partition=urgent", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true"]
    with held(ranks(pipeline)):
        other = Submitted(slurm("sbatch", "--parsable", *words).strip(), pipeline.folder)
        pipeline.wait_for(lambda: "PreemptTime=None" not in pipeline.shown(), "its preemption")
    other.finish()
    assert pipeline.restarts == 1
    pipeline.finish()
    first, last = pipeline.attempts()
    assert (first.kind, last.kind) == (Kind.STOPPED, Kind.FINISHED) and first.reason in ("SIGTERM", "SIGUSR1")
    assert first.step == first.saved < STEPS
    pipeline.assert_each_resumed()
    assert_same_run(pipeline.folder, whole_pipeline, STEPS)


HANG = """
import time

_agreed = StopSignals.agreed


def agreed(self):
    if _agreed(self):
        time.sleep(1000)


StopSignals.agreed = agreed
"""


def test_a_time_limit_before_a_checkpoint_is_complete(corpus: Corpus, tmp_path: Path, whole_pipeline: Path) -> None:
    """Processes that should save, and hang: they are warned, signalled and killed, and the job's script, which Slurm
    kills with them, has had the job requeued before that. They are held until Slurm, which looks seldom, signals
    them."""
    options = two_nodes(tmp_path, options=["--hold"])
    job = submit(run_of(corpus, tmp_path / "run", PIPELINE), *options)
    signals = job.folder / "slurm" / "1" / "code" / "depthbench" / "training" / "signals.py"
    as_it_was = signals.read_text()
    signals.write_text(as_it_was + HANG)
    slurm("scontrol", "release", job.number)
    job.wait_for_step(25)
    with held(ranks(job)):
        slurm("scontrol", "update", f"job={job.number}", "EndTime=now+1")
        job.wait_for(lambda: job.restarts == 1, "a requeue")
    slurm("scontrol", "update", f"job={job.number}", "TimeLimit=60")
    signals.write_text(as_it_was)
    job.finish()
    first, *_, last = job.attempts()
    assert (first.kind, last.kind) == (Kind.FAILED, Kind.FINISHED)
    assert first.reason == "the time limit came before a checkpoint was complete" and "asked to stop" in job.log()
    job.assert_each_resumed()
    assert_same_run(job.folder, whole_pipeline, STEPS)


def test_cancelled_is_cancelled(pipeline: Submitted) -> None:
    slurm("scancel", pipeline.number)
    assert pipeline.ends() == "CANCELLED"
    assert pipeline.restarts == 0


@contextlib.contextmanager
def without(node: str) -> Iterator[None]:
    """Slurm hears nothing more of the node; at the end it is there again."""
    configuration = os.environ["SLURM_CONF"]
    os.kill(int((Path(configuration).parent / "run" / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
    try:
        yield
    finally:
        subprocess.run(["slurmd", "-f", configuration, "-N", node], check=True)


def test_a_lost_node_whose_processes_live_on(running: Submitted, whole: Path) -> None:
    """Slurm gives the node up and requeues the job elsewhere. The old processes, which had only been held up, find that
    the run is no longer theirs, and write nothing more."""
    (node,) = running.nodes
    with without(node):
        with held(processes(running)):
            owner = running.folder / "attempt"
            running.wait_for(lambda: owner.read_text() == f"{running.number}.1", "another attempt")
            before = running.step
        running.finish()
    lost, last = running.attempts()
    assert (lost.attempt, lost.kind, last.kind) == (f"{running.number}.0", Kind.LOST, Kind.FINISHED)
    assert before < STEPS
    assert f"attempt {running.number}.0 no longer owns" in running.log()
    running.assert_each_resumed()
    assert_same_run(running.folder, whole, STEPS)


def test_a_killed_rank_of_the_second_node(pipeline: Submitted, whole_pipeline: Path) -> None:
    """The first stage, on another node, loses its partner; the job resumes from the newest checkpoint."""
    (stage,) = of_node(pipeline, 1)
    os.kill(stage, signal.SIGKILL)
    pipeline.finish()
    first, last = pipeline.attempts()
    assert (first.kind, last.kind) == (Kind.FAILED, Kind.FINISHED)
    assert first.step - first.saved <= 20
    pipeline.assert_each_resumed()
    assert_same_run(pipeline.folder, whole_pipeline, STEPS)


def test_a_stage_that_hangs(corpus: Corpus, tmp_path: Path, whole_pipeline: Path) -> None:
    """The stage on the other node gives up waiting for it and says so; Slurm ends both, and the job resumes."""
    run = run_of(corpus, tmp_path / "run", PIPELINE)
    with as_job(replace(run, pipeline=replace(run.pipeline, timeout=20.0)), *two_nodes(tmp_path)) as job:
        with held(of_node(job, 1)):
            job.wait_for(lambda: len(job.attempts()) == 1, "its end")
        job.finish()
    first, last = job.attempts()
    assert (first.kind, last.kind) == (Kind.FAILED, Kind.FINISHED)
    assert re.search(r"stage 0: waited \d+ s for the .*\(limit 20 s\)", first.reason)
    job.assert_each_resumed()
    assert_same_run(job.folder, whole_pipeline, STEPS)


def test_the_second_node_is_lost(pipeline: Submitted, whole_pipeline: Path) -> None:
    """With the stage on it. Slurm ends what is left on the first, where the job's script runs, and requeues the job on
    other nodes."""
    _, node = pipeline.nodes
    with without(node):
        with held(of_node(pipeline, 1)):
            pipeline.wait_for(lambda: pipeline.restarts == 1, "a requeue")
        pipeline.finish()
    lost, last = pipeline.attempts()
    assert (lost.attempt, lost.kind, last.kind) == (f"{pipeline.number}.0", Kind.LOST, Kind.FINISHED)
    pipeline.assert_each_resumed()
    assert_same_run(pipeline.folder, whole_pipeline, STEPS)


def test_a_failure_that_repeats_itself_ends_the_job(corpus: Corpus, tmp_path: Path) -> None:
    """A loss that is not finite, of samples that come again: two attempts, and it is said why."""
    run = run_of(corpus, tmp_path / "run")
    job = submit(replace(run, optimizer=replace(run.optimizer, lr=1e30, clip_norm=0.0, warmup_fraction=0.0)))
    assert job.ends() == "FAILED"
    first, second = job.attempts()
    assert first.kind is second.kind is Kind.FAILED and first.failure == second.failure
    assert "failed alike, at step" in job.log()


def test_an_array_runs_one_after_another(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs, one at a time, each with its own folder."""
    given, sweep = tmp_path / "given.yaml", tmp_path / "seeds.yaml"
    short = run_of(corpus, tmp_path / "unused")
    given.write_text(yaml.safe_dump(plain(replace(short, train=replace(short.train, steps=4)))))
    sweep.write_text("limit: 1\ngrid: {seed: [1, 2, 3]}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", str(given), "--cluster", "local-slurm", "--array", str(sweep)]) == 0
    (number,) = re.findall(r"submitted job (\d+)", capsys.readouterr().out)
    folders = [tmp_path / "runs" / "seeds" / str(seed) for seed in (1, 2, 3)]
    jobs = [Submitted(f"{number}_{task}", folder) for task, folder in enumerate(folders)]
    most = 0
    while any(job.state in ("PENDING", "RUNNING", "COMPLETING") for job in jobs):
        most = max(most, slurm("squeue", "--noheader", f"--jobs={number}", "--format=%T").count("RUNNING"))
    assert [job.state for job in jobs] == ["COMPLETED"] * 3 and most == 1
    assert all(status(folder)["state"] == "finished" for folder in folders)
    assert len({str(exact(folder)) for folder in folders}) == 3


def test_a_task_of_an_array_is_requeued_alone(
    corpus: Corpus,
    tmp_path: Path,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last one, whose job id is the array's: warned of its time limit while one of its siblings is at work and the
    other has finished."""
    given, sweep = tmp_path / "given.yaml", tmp_path / "lengths.yaml"
    given.write_text(yaml.safe_dump(plain(run_of(corpus, tmp_path / "unused"))))
    lengths = (4, 100 * STEPS, STEPS)
    sweep.write_text(f"limit: 2\ngrid: {{train.steps: {list(lengths)}}}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["submit", str(given), "--cluster", "local-slurm", "--array", str(sweep)]) == 0
    (number,) = re.findall(r"submitted job (\d+)", capsys.readouterr().out)
    done, sibling, last = (
        Submitted(f"{number}_{task}", tmp_path / "runs" / "lengths" / str(steps)) for task, steps in enumerate(lengths)
    )
    try:
        last.wait_for_step(25)
        assert last.shown().startswith(f"JobId={number} ")
        assert (done.state, sibling.state) == ("COMPLETED", "RUNNING")
        slurm("scancel", "--batch", "--signal=USR1", last.number)
        last.wait_for(lambda: last.restarts == 1, "a requeue")
        last.finish()
        assert (done.state, sibling.state) == ("COMPLETED", "RUNNING")
    finally:
        slurm("scancel", "--quiet", number)
    assert [ended.kind for ended in last.attempts()] == [Kind.STOPPED, Kind.FINISHED]
    last.assert_each_resumed()
    assert_same_run(last.folder, whole, STEPS)
    assert (done.restarts, sibling.restarts) == (0, 0)
    assert [ended.kind for ended in done.attempts()] == [Kind.FINISHED]
    assert sibling.ends() == "CANCELLED" and not [one for one in sibling.attempts() if one.kind is not Kind.CANCELLED]


def test_killed_at_random_moments(corpus: Corpus, tmp_path: Path, whole: Path) -> None:
    """All processes of the run at once, five times, twice while a checkpoint is being written; once the job's script
    with them, after which nobody is left to requeue it, and it is submitted again by hand."""
    moments = random.Random(7)
    job = submit(run_of(corpus, tmp_path / "run"))

    def saving() -> bool:
        return any((job.folder / "checkpoints").glob(".saving-*"))

    def kill(number: int) -> None:
        slurm("scancel", "--signal=KILL", f"{job.number}.0")
        job.wait_for(lambda: len(job.attempts()) == number + 1, "its end")

    step = 0
    for number in range(4):
        step += moments.randint(22, 55)
        job.wait_for_step(step)
        killed = False
        while number % 2 and not killed:
            job.wait_for(saving, "a save")
            with held(processes(job)):
                if saving():  # not complete yet
                    kill(number)
                    killed = True
        if not killed:
            kill(number)
        step = job.attempts()[-1].saved
    job.wait_for_step(step + moments.randint(22, 55))
    for pid in script_and_all(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert job.ends() == "FAILED"
    job.assert_each_resumed()
    assert [ended.kind for ended in job.attempts()] == [Kind.FAILED] * 4
    saved = latest(job.folder / "checkpoints")

    again = sbatch(job.folder / "slurm" / "1" / "submit.sbatch", job.folder)
    again.finish()
    assert again.attempts()[-1].kind is Kind.FINISHED
    assert saved and again.began(f"{again.number}.0") == saved.step > step
    assert_same_run(job.folder, whole, STEPS)
