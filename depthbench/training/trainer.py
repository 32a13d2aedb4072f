"""The training loop: from a checked run to its last step, or to a stop that loses nothing."""

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from depthbench.checkpoint import tensors
from depthbench.checkpoint.fence import Fence
from depthbench.checkpoint.store import CheckpointWriter, load, load_weights
from depthbench.config.load import plain
from depthbench.config.schema import EvalForm, RunConfig
from depthbench.config.validate import microbatches
from depthbench.data.corpus import blend
from depthbench.data.evaluation import evaluation_set
from depthbench.data.loader import Batch, SampleOrder, batches
from depthbench.errors import UserError
from depthbench.logs.console import ConsoleLog, step_line
from depthbench.logs.hardware import peak_flops, peak_memory_gib
from depthbench.logs.metrics import MetricsLog
from depthbench.model.build import build_stages
from depthbench.parallel import startup
from depthbench.parallel.context import ParallelContext
from depthbench.pipeline.build import make_transport
from depthbench.planning.cluster import Cluster
from depthbench.planning.flops import train_per_token
from depthbench.profiling.session import Session

from .evaluation import evaluate
from .guard import NonFiniteError, SpikeGuard, first_bad_gradient, first_bad_layer
from .layer_stats import LayerStats
from .optimizer import Optimizer
from .preflight import Preflight, checkpoints_of, preflight
from .provenance import record
from .schedule import learning_rate
from .signals import StopSignals
from .status import settle_status, write_status
from .step import run_microbatches
from .wrapped import wrap

PROFILE = "profile"  # folder of recordings, in the run folder


def train(run: RunConfig) -> int:
    """Train `run` on the processes that torchrun started (or on this one); resume where its folder says.

    Returns the exit status: 0 when the run is finished or was stopped by a signal after saving, 3 when a loss or
    gradient was not finite. Raises UserError, before any process group starts, for a run that cannot work.
    """
    rank, world_size, local_rank = startup.world_from_environment()
    ready = preflight(run, world_size, first_of_node=local_rank == 0)
    if ready.finished:
        assert ready.resume
        if rank == 0:
            print(f"{run.name} is finished: {ready.resume.path} is step {ready.resume.step} of {ready.last_step}")
            settle_status(ready.folder, ready.resume.step, run.train.steps)
        return 0
    context = startup.start(run)
    trainer = Trainer(run, ready, context)
    return conduct(trainer, trainer.loop)


def conduct(trainer: "Trainer", work: Callable[[], None]) -> int:
    """Do a trainer's work, and leave word of its end in the run folder, whatever it is. Returns the exit status."""
    code = 0
    try:
        work()
    except NonFiniteError as error:  # on all ranks alike
        trainer.end_recording()
        trainer.writer.close()
        trainer.leave("failed", str(error))
        code = 3
    except BaseException as error:
        with suppress(Exception):  # it is the first error that is to be told
            if trainer.session:
                trainer.session.keep()
        if trainer.leads:
            write_status(trainer.ready.folder, "failed", trainer.step, repr(error))
        raise
    finally:
        trainer.close()
    startup.stop()  # not after any other error: the other ranks are still at work, and would be waited for
    return code


class Trainer:
    """A run in progress on this rank."""

    def __init__(self, run: RunConfig, ready: Preflight, context: ParallelContext) -> None:
        _agree(ready)  # also: sample indices are in the cache of every node
        self.run, self.ready, self.context = run, ready, context
        self.leads = dist.get_rank() == 0
        self.fence = Fence(ready.folder)
        if self.leads:
            self.fence.check()
        transport = make_transport(run, context)
        stages = build_stages(run, context, transport, draw=not (ready.resume or ready.initial))
        self.model = wrap(run, [stage.to(torch.cuda.current_device()) for stage in stages], transport)
        self.optimizer = Optimizer(run, self.model)
        self.step = self.consumed = self.skipped = 0
        norms: list[float] = []
        if ready.resume:
            norms = self._load()
        elif ready.initial:
            weights = tensors.model_tensors(self.model.stages)
            load_weights(ready.initial, weights, tensors.master_weights(self.optimizer))
        self.guard = SpikeGuard(run.train, norms)
        self.signals = StopSignals()
        self.console = ConsoleLog(ready.last_step, self.step) if self.leads else None
        self.metrics: MetricsLog | None = None
        if self.leads:
            self.fence.check()  # again, after all that loading: files are cut back now
            self.metrics = MetricsLog(run.log, run.name, ready.folder, self.step, plain(run))
        self.writer = CheckpointWriter(checkpoints_of(ready.folder), run.checkpoint, self.say)
        self.session: Session | None = None
        self.flops = train_per_token(run)
        self.peak = peak_flops(run.log.peak_tflops)
        # else Python goes through all that was imported and built, now and then, 0.3 s during which other stages wait
        gc.collect()
        gc.freeze()
        self.durations: deque[float] = deque(maxlen=20)
        if self.leads:
            record(run, ready.folder, dist.get_world_size(), self.step)
            write_status(ready.folder, "running", self.step)

    # -- the loop -------------------------------------------------------------------------------------------------
    def loop(self) -> None:
        run, last_step = self.run, self.ready.last_step
        if run.profile.steps and self.step < run.profile.steps[0]:
            self.record(self.ready.folder / PROFILE)
        stream = self.stream()
        self.say(f"{run.name}: step {self.step} of {run.train.steps}, {dist.get_world_size()} processes")
        if self.ready.initial:
            self.say(f"weights of {self.ready.initial.path}")
        while self.step < last_step:
            began = time.perf_counter()
            values = self.advance(stream)
            self.report(values, time.perf_counter() - began)
            if self.session and self.session.due(self.step, last_step):
                self.save_recording()
            with self.model.waiting("other ranks' word of signals"):
                stopped = self.signals.agreed()
            if not stopped and self._due(run.train.eval_every):
                stopped = self._evaluate(values)
            if self.metrics:
                self.fence.check()
                self.metrics.write(self.step, values)
            self.writer.poll()
            if stopped or self.step == last_step or self._due(run.checkpoint.every):
                self._save()
            if stopped and self.step < last_step:
                self.end_recording()
                self.writer.close()
                return self.leave("stopped", stopped)
        self.writer.close()
        finished = last_step == run.train.steps
        self.leave("finished" if finished else "stopped", "" if finished else f"train.stop_at={last_step}")

    def advance(self, stream: Iterator[Batch]) -> dict[str, float]:
        """The next optimizer step, recorded if the run's settings say so; what there is to report of it."""
        count = microbatches(self.run, dist.get_world_size())
        with self.session.step(self.step + 1) if self.session else nullcontext():
            batch = [next(stream) for _ in range(count)]  # kept until the update, for fault finding
            values = self._update(batch)
        self.step += 1
        self.consumed += self.run.train.global_batch
        if self.session:
            self.session.after(int(values["tokens"]))
        return values

    def record(self, folder: Path, cluster: Cluster | None = None) -> None:
        """Record the steps of `profile.steps` from now on; cluster as `Session` has it. A collective call, as is the
        next."""
        self.session = Session(self.run, self.context, self.model.transport, self.optimizer, folder, cluster)

    def save_recording(self, memory_bytes: int | None = None) -> None:
        """memory_bytes: see `Session.save`."""
        assert self.session
        self.say(self.session.save(memory_bytes))

    def end_recording(self) -> None:
        """Save what has been recorded where the run ends before its last recorded step. A collective call."""
        if self.session and self.session.open:
            self.save_recording()

    def _due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: never) happens now; the last of all steps counts as one."""
        return every > 0 and (self.step % every == 0 or self.step == self.run.train.steps)

    def _update(self, microbatches: list[Any]) -> dict[str, float]:
        """One step's passes and update; NonFiniteError before anything has changed."""
        run = self.run
        lr = learning_rate(self.step + 1, run.train.steps, run.optimizer)
        every = run.log.layer_stats_every
        stats = LayerStats(self.model.stages) if every and (self.step + 1) % every == 0 else None
        self.optimizer.zero_grad()
        with stats or nullcontext():
            loss = run_microbatches(self.model, microbatches, forward_only=False)
        if not math.isfinite(loss.total):
            self._fail("loss", loss.mean, f"first non-finite output in {first_bad_layer(self.model, microbatches)}")
        grad_norm = self.optimizer.prepare()
        if not math.isfinite(grad_norm):
            self._fail(
                "gradient norm", grad_norm, f"first non-finite gradient in {first_bad_gradient(self.model.stages)}"
            )
        if self.guard.skips(grad_norm):
            self.skipped += 1
            self.say(f"step {self.step + 1}: gradient norm {grad_norm:.3g} is a spike, update skipped")
        else:
            self.optimizer.apply(lr, grad_norm)
        values = {"loss": loss.mean, "grad_norm": grad_norm, "lr": lr, "tokens": loss.tokens, "skipped": self.skipped}
        return {**values, **(stats.collect(loss.tokens) if stats else {})}

    def _fail(self, what: str, value: float, where: str) -> None:
        samples = f"samples {self.consumed} to {self.consumed + self.run.train.global_batch - 1}"
        raise NonFiniteError(
            f"step {self.step + 1}: {what} is {value}; {where} ({samples}). Weights are those of step {self.step}; "
            "nothing of this step was saved"
        )

    def _evaluate(self, values: dict[str, float]) -> str | None:
        """Add the validation loss to `values`; the name of a signal that came meanwhile."""
        items = evaluation_set(
            self.ready.valid, self.run.data.eval_form is EvalForm.DOCUMENTS, self.run.train.eval_sequences
        )
        signals: list[str] = []

        def interrupted() -> bool:
            if name := self.signals.agreed():
                signals.append(name)
            return bool(signals)

        loss = evaluate(self.model, items, self.run.train.micro_batch, interrupted)
        if loss is None:
            return signals[0]
        values["eval/loss"] = loss.mean
        known = self.ready.unigram_entropy
        yardstick = f" (token frequencies alone: {known:.4f})" if known else ""
        self.say(f"step {self.step}: validation loss {loss.mean:.4f} over {loss.tokens:,} tokens{yardstick}")
        return None

    # -- reports --------------------------------------------------------------------------------------------------
    def say(self, text: str) -> None:
        if self.console:
            self.console.line(text)

    def report(self, values: dict[str, float], seconds: float) -> None:
        self.durations.append(seconds)
        world = dist.get_world_size()
        speed = values["tokens"] / seconds
        values.update(
            tokens_per_second=speed,
            tokens_per_second_per_rank=speed / world,
            memory_gib=peak_memory_gib(),
            step_seconds=seconds,
            eta_seconds=statistics.mean(self.durations) * (self.ready.last_step - self.step),
        )
        if self.peak:
            values["mfu"] = speed * self.flops / (self.peak * world)
        if self.console:
            self.console.advance(self.step)
            if self.step % self.run.log.every == 0:
                self.console.line(step_line(self.step, self.run.train.steps, values))

    def leave(self, state: str, reason: str) -> None:
        """Mark how this process ended. `state` is finished, stopped (to be resumed) or failed."""
        if self.leads:
            write_status(self.ready.folder, state, self.step, reason)
        self.say(f"{self.run.name}: {state} at step {self.step}" + (f" ({reason})" if reason else ""))

    def close(self) -> None:
        self.signals.restore()
        gc.unfreeze()
        if self.metrics:
            self.metrics.close()
        if self.console:
            self.console.close()

    # -- position and state ---------------------------------------------------------------------------------------
    def stream(self) -> Iterator[Batch]:
        """This rank's microbatches from where the run is to its last step."""
        run, remaining = self.run, self.ready.last_step - self.step
        end = self.consumed + remaining * run.train.global_batch
        order = SampleOrder(self.consumed, end, run.train.micro_batch, self.context.dp_rank, self.context.dp_size)
        found = iter(batches(blend(self.ready.train, self.ready.weights, end), order, run.data.workers))
        return self.session.loading(found) if self.session else found

    def _save(self) -> None:
        if self.metrics:
            self.metrics.flush()
        self.optimizer.weights_are_current()
        manifest = {
            "format": 1,
            "step": self.step,
            "consumed_samples": self.consumed,
            "updates": tensors.updates_done(self.optimizer),
            "skipped": self.skipped,
            "recent_grad_norms": list(self.guard.norms),
            "architecture": self.run.architecture,
            "precision": self.run.train.precision.value,
            "data": self.ready.data_identity,
            "settings": plain(self.run),
        }
        state = [*self._tensors(), *tensors.random_state(dist.get_rank(), dist.get_world_size())]
        self.writer.save(self.step, state, manifest)

    def _tensors(self) -> list[Any]:
        return [*tensors.model_tensors(self.model.stages), *tensors.optimizer_tensors(self.optimizer)]

    def _load(self) -> list[float]:
        """Continue from the checkpoint that preflight found; the gradient norms that the spike guard knew."""
        checkpoint = self.ready.resume
        assert checkpoint
        random = tensors.random_state(dist.get_rank(), dist.get_world_size())
        if load(checkpoint, self._tensors(), random):
            torch.set_rng_state(random[0].data.view(-1))
        manifest = checkpoint.manifest()
        tensors.set_updates_done(self.optimizer, manifest["updates"])
        self.step, self.consumed = manifest["step"], manifest["consumed_samples"]
        self.skipped = manifest["skipped"]
        norms: list[float] = manifest["recent_grad_norms"]
        return norms


def _agree(ready: Preflight) -> None:
    """Raise UserError, on all ranks, where they found different checkpoints or data in what should be one folder."""
    mine = {
        "checkpoint": ready.resume.step if ready.resume else None,
        "initial": ready.initial.step if ready.initial else None,
        "data": ready.data_identity,
    }
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise UserError(
                f"rank 0 found {everyone[0]}, rank {rank} found {theirs}: the run folder {ready.folder} and the data "
                "must be the same on every node"
            )
