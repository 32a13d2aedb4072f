"""`depthbench profile RUN`: a few steps of a run, recorded, that leave its folder's checkpoints alone."""

import signal
import time
from dataclasses import replace
from types import FrameType

import torch
from rich.console import Console

from depthbench.config.schema import LogConfig, RunConfig
from depthbench.parallel import startup
from depthbench.planning.cluster import Cluster
from depthbench.profiling.analysis import summarize
from depthbench.profiling.events import load_recording
from depthbench.profiling.live_storages import LiveStorages
from depthbench.profiling.render import summary_table

from .memory import held_bytes
from .preflight import preflight
from .trainer import PROFILE, Trainer, conduct


def recorded(run: RunConfig, warmup: int, steps: int, measure: int) -> RunConfig:
    """`run` with a folder of its own, without evaluation, to stop after `warmup` steps, `steps` that are recorded and
    `measure` more."""
    last = warmup + steps + measure
    return replace(
        run,
        run_dir=f"{run.folder}/{PROFILE}",
        train=replace(run.train, steps=max(run.train.steps, last), stop_at=last, eval_every=0),
        log=LogConfig(tensorboard=False, peak_tflops=run.log.peak_tflops),
        profile=replace(run.profile, steps=[warmup + 1, warmup + steps]),
    )


def profile(run: RunConfig, warmup: int, steps: int, cluster: Cluster | None = None) -> int:
    """Run and record on the processes that torchrun started; results lie in `profile/` of the run folder. cluster: what
    the steps' time is planned for, if for any.

    Returns the exit status. Raises UserError, before any process group starts, for a run that cannot work.
    """
    rank, world_size, local_rank = startup.world_from_environment()
    # a CPU's memory is measured in one more step: to count every tensor takes time that the recording would show
    run = recorded(run, warmup, steps, measure=0 if torch.cuda.is_available() else 1)
    ready = preflight(run, world_size, first_of_node=local_rank == 0)
    trainer = Trainer(run, ready, startup.start(run))
    trainer.signals.restore()  # there is no checkpoint to save
    signal.signal(signal.SIGTERM, _end)  # as torchrun sends where a rank is lost: what is recorded is kept

    def record() -> None:
        trainer.record(ready.folder, cluster)
        stream = trainer.stream()
        for _ in range(warmup + steps):
            began = time.perf_counter()
            trainer.report(trainer.advance(stream), time.perf_counter() - began)
        memory = None
        if not torch.cuda.is_available():
            before = held_bytes(trainer.model, trainer.optimizer)
            with LiveStorages() as storages:
                trainer.advance(stream)
            memory = before + storages.peak
        trainer.save_recording(memory)
        trainer.leave("finished", "")

    code = conduct(trainer, record)
    if rank == 0 and code == 0:
        Console().print(summary_table(summarize(load_recording(ready.folder))))
    return code


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
