"""The recording of some steps of a run: set up on every rank, saved by every rank, turned into files by the first."""

import platform
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from depthbench.config.load import plain
from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, microbatch_group, microbatches
from depthbench.parallel.context import ParallelContext
from depthbench.pipeline.transport import Transport
from depthbench.planning.cluster import Cluster
from depthbench.planning.memory import CPU, CUDA
from depthbench.planning.plan import make_plan

from .clocks import make_clock, offset_to_rank_0
from .events import PLAN, Kind, RankRecord, load_recording, save_plan, save_rank
from .recorder import Places, Recorder
from .render import OUTPUTS, write_outputs


class Session:
    """Records the steps `run.profile.steps` into `folder`. Made by all processes together.

    optimizer: with methods `prepare` and `apply`. cluster: what the steps' time is planned for, if for any.
    """

    def __init__(
        self,
        run: RunConfig,
        context: ParallelContext,
        transport: Transport | None,
        optimizer: Any,
        folder: Path,
        cluster: Cluster | None = None,
    ) -> None:
        assert run.profile.steps
        self.run, self.context, self.folder, self.cluster = run, context, folder, cluster
        self.first, self.last = run.profile.steps
        count = microbatches(run, dist.get_world_size())
        places = Places(layout_of(run), context.pp_group.rank(), count, microbatch_group(run))
        self.recorder = Recorder(places, transport, optimizer, context.megatron, make_clock())
        self.recording = self.open = False
        self.tokens: list[int] = []
        self.offset = self.clock_error = 0.0
        self.tools = ExitStack()  # torch's, where they are wanted

    def step(self, number: int) -> AbstractContextManager[None]:
        """Around optimizer step `number`."""
        self.recording = self.first <= number <= self.last
        if not self.recording:
            return nullcontext()
        if not self.open:
            self._start()
        return self.recorder.step(number)

    def loading(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, each with a span for how long it took to come."""
        stream = iter(batches)
        while True:
            with self.recorder.span(Kind.DATA) if self.recording else nullcontext():
                try:
                    batch = next(stream)
                except StopIteration:
                    return
            yield batch

    def after(self, tokens: int) -> None:
        """To be told of each step that has been: its tokens, over all ranks."""
        if self.recording:
            self.tokens.append(tokens)
            if len(self.tokens) == self.last - self.first + 1:
                self.tools.close()
        self.recording = False

    def due(self, number: int, last: int) -> bool:
        """Whether `save` is due after step `number` of a training that ends with step `last`."""
        return self.open and number in (self.last, last)

    def _start(self) -> None:
        self.open = True
        self.folder.mkdir(parents=True, exist_ok=True)
        if dist.get_rank() == 0:
            # of a recording with more ranks, perhaps; and what was made of it would look current, were this one to die
            for old in (*self.folder.glob("*rank-*"), *(self.folder / name for name in (PLAN, *OUTPUTS))):
                old.unlink(missing_ok=True)
            kernels = CUDA if torch.cuda.is_available() else CPU
            plan = make_plan(self.run, None, dist.get_world_size(), self.cluster, kernels)
            save_plan(self.folder, {**plan.as_dict(), "run": plain(self.run)})
        own_error = self.recorder.clock.start()
        offset, error = offset_to_rank_0()
        self.clock_error = own_error + error
        now = self.recorder.clock.microseconds(self.recorder.clock.mark())
        origin = torch.tensor([now], dtype=torch.float64, device=torch.cuda.current_device())
        dist.broadcast(origin, src=0)
        self.offset = offset - float(origin)
        rank = f"rank-{dist.get_rank():05d}"
        if self.run.profile.torch_trace:
            profiler = torch.profiler.profile(
                on_trace_ready=lambda found: found.export_chrome_trace(str(self.folder / f"torch-{rank}.json"))
            )
            self.tools.enter_context(profiler)
        if self.run.profile.memory_snapshot and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
            self.tools.callback(torch.cuda.memory._record_memory_history, None)
            self.tools.callback(torch.cuda.memory._dump_snapshot, str(self.folder / f"memory-{rank}.pickle"))

    def save(self, memory_bytes: int | None = None) -> str:
        """Write this rank's file, and on rank 0 what is made of all of them; returns what there is to say of it. A
        collective call.

        memory_bytes: the most that this rank has held in a step, where no device's allocator can be asked.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.keep(memory_bytes)
        dist.barrier()
        return self._outputs() if dist.get_rank() == 0 else ""

    def keep(self, memory_bytes: int | None = None) -> None:
        """Write what this rank has recorded, if that is not done yet. Waits for nobody, so that it can be called where
        other ranks are lost and the device hangs."""
        if not self.open:
            return
        self.open = False
        if torch.cuda.is_available():
            memory_bytes = torch.cuda.max_memory_allocated()  # the job's so far: its metrics report that as well
        context = self.context
        record = RankRecord(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            data=context.dp_rank,
            pipeline=context.pp_group.rank(),
            tensor=context.tp_rank,
            host=platform.node(),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            clock_error=self.clock_error,
            memory_bytes=memory_bytes,
            cache_bytes=self.recorder.cache_bytes,
            cache_hit_bytes=self.recorder.cache_hit_bytes,
            tokens=self.tokens,
            spans=self.recorder.spans(self.offset),
        )
        self.recorder.taken.clear()  # a job goes on
        save_rank(self.folder, record)
        self.tools.close()

    def _outputs(self) -> str:
        try:
            write_outputs(load_recording(self.folder))
        except Exception as error:  # a picture that cannot be drawn must not end the run
            return f"recorded; its report failed ({error!r}), `depthbench profile --report {self.folder}` tries again"
        return f"recorded steps {self.first} to {self.last}: {self.folder}/report.html"
