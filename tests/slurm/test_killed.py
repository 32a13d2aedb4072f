"""`kill -9` of all processes of a run at random moments, again and again: it resumes each time, and in the end it is
the run that nothing happened to. The same under Slurm is in test_with_slurm.py."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from depthbench.checkpoint.folder import latest
from depthbench.config.schema import CheckpointMode, RunConfig
from depthbench.training.trainer import Trainer
from tests.corpora import Corpus, trainable_run
from tests.harness import WORKER_SECONDS, run_workers, start_workers
from tests.training.test_resume import assert_same_run, training

pytestmark = pytest.mark.slurm

STEPS, KILLS, EVERY = 160, 15, 5


@dataclass(frozen=True)
class Moment:
    """starting: both processes are there. step: their trainer has noted in `began` that it goes on, and there is a line
    of metrics of step `after` + `steps`. After either, `delay` seconds pass. saving: a checkpoint is being written, and
    is not complete yet; `remnants`, of earlier starts, do not count."""

    kind: str
    after: int
    steps: int
    delay: float
    remnants: set[str]
    began: Path

    def come(self, folder: Path) -> bool:
        if self.kind == "saving":
            return bool(_unfinished(folder) - self.remnants)
        trains = any(self.began.iterdir())  # else its metrics are those of an earlier start
        return self.kind == "starting" or (trains and _last_step(folder) >= self.after + self.steps)


def _unfinished(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob(".saving-step_*")}


def _last_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    whole = (
        [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
    )
    step: int = json.loads(whole[-1])["step"] if whole else 0
    return step


def kill_at(moment: Moment, folder: Path, notes: Path) -> None:
    """Kill both ranks, and with each what it has started, as soon as the moment has come."""
    deadline = time.monotonic() + WORKER_SECONDS

    def send(number: int) -> None:
        for note in notes.iterdir():
            os.killpg(int(note.name), number)

    while time.monotonic() < deadline:
        if len(list(notes.iterdir())) == 2 and moment.come(folder):
            if moment.kind != "saving":
                time.sleep(moment.delay)
                return send(signal.SIGKILL)
            send(signal.SIGSTOP)
            if moment.come(folder):  # held in the middle of it
                return send(signal.SIGKILL)
            send(signal.SIGCONT)  # too late: the next one
        time.sleep(0.002)


def noting(notes: Path, began: Path) -> Callable[[int], None]:
    """Each rank leaves its process id, which is its group's: tests.harness sees to that. The first one's trainer leaves
    in `began` a file named by the step from which it goes on."""

    def before(rank: int) -> None:
        loop = Trainer.loop

        def noted(self: Trainer) -> None:
            if rank == 0:
                (began / str(self.step)).touch()
            loop(self)

        Trainer.loop = noted  # type: ignore[method-assign]
        (notes / str(os.getpid())).touch()

    return before


def run_of(corpus: Corpus, folder: Path) -> RunConfig:
    return trainable_run(
        corpus,
        folder,
        parallel={"distributed_optimizer": True},
        train={"steps": STEPS, "eval_every": 0},
        checkpoint={"every": EVERY},
    )


def test_killed_again_and_again(corpus: Corpus, tmp_path: Path) -> None:
    moments = random.Random(20)
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run_workers(2, training, run_of(corpus, whole))
    kinds = [*["step", "saving", "starting"] * (KILLS // 3)]
    moments.shuffle(kinds)
    run = run_of(corpus, folder)
    for number, kind in enumerate(kinds):
        notes, began = tmp_path / f"processes-{number}", tmp_path / f"began-{number}"
        notes.mkdir()
        began.mkdir()
        saved = latest(folder / "checkpoints")
        step = saved.step if saved else 0
        delay = moments.uniform(0, 0.5 if kind == "starting" else 0.05)
        moment = Moment(kind, step, moments.randint(1, 2 * EVERY), delay, _unfinished(folder), began)
        killer = multiprocessing.get_context("fork").Process(target=kill_at, args=(moment, folder, notes))
        killer.start()
        mode = moments.choice(list(CheckpointMode))
        attempt = replace(run, checkpoint=replace(run.checkpoint, mode=mode))
        codes, said, _ = start_workers(2, training, attempt, noting(notes, began))
        killer.join()
        assert codes == [-signal.SIGKILL] * 2, f"{moment}: {said}"
        if kind == "saving":
            assert moment.come(folder), "what was being written is left behind"
        found = [file.name for file in began.iterdir()]
        assert found == [str(step)] or (kind == "starting" and not found)
    saved, began = latest(folder / "checkpoints"), tmp_path / "began"
    began.mkdir()
    assert run_workers(2, training, run, noting(tmp_path, began)) == [0, 0]
    assert saved and [file.name for file in began.iterdir()] == [str(saved.step)]
    assert_same_run(folder, whole, STEPS)
