"""The plan's simulator, fed with what a recording measured."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from depthbench.config.load import merge, parse_overrides, plain, typed
from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_run, layout_of
from depthbench.errors import UserError
from depthbench.planning.simulate import Costs, Simulation, simulate_pass

from .events import Kind, Recording
from .parts import Key, messages


@dataclass(frozen=True)
class Calibration:
    """costs: seconds; of a chunk its runs' mean, with what lies between a stage's runs and is no wait. computing: of
    that share, what was inside the runs. run: the settings that were recorded."""

    run: RunConfig
    world_size: int
    costs: Costs
    computing: float

    def changed(self, overrides: Sequence[str]) -> RunConfig:
        """The recorded run with other settings. Raises UserError for those that change what a chunk is or costs."""
        _, changes = parse_overrides(list(overrides))
        run = typed(merge(plain(self.run), changes))
        for name in ("model", "architecture", "residual", "parallel"):
            if getattr(run, name) != getattr(self.run, name):
                raise UserError(f"{name} is not what was recorded; only batches and the schedule can be another's")
        if run.train.micro_batch != self.run.train.micro_batch:
            raise UserError(
                f"train.micro_batch={run.train.micro_batch} is not the recorded {self.run.train.micro_batch}: costs "
                "are those of its microbatches"
            )
        check_run(run, self.world_size)
        return run

    def simulated(self, run: RunConfig | None = None) -> Simulation:
        """One pass; of `run`, where it has the same chunks and other microbatches or another schedule."""
        return simulate_pass(run or self.run, self.world_size, self.costs)

    def bubble(self, simulation: Simulation) -> float:
        """Idle share of a simulated pass as a recording counts it: outside the runs themselves."""
        return 1 - (1 - simulation.bubble) * self.computing


def calibrate(recording: Recording, steps: Sequence[int]) -> Calibration:
    """From these steps of a recording. Raises UserError where it has no plan, or a rank is missing."""
    if recording.missing:
        raise UserError(f"{recording.folder} is not whole (ranks {recording.missing} missing): record again")
    if recording.plan is None or not isinstance(recording.plan["run"], dict):
        raise UserError(f"{recording.folder} does not say which settings were recorded: record again")
    run = typed(recording.plan["run"])
    chosen = set(steps)
    runs: dict[tuple[int, bool], list[float]] = defaultdict(list)
    inside = between = 0.0
    for record in recording.ranks:
        for step in chosen:
            found = sorted((s for s in record.spans if s.step == step), key=lambda span: span.begin)
            passes = [s for s in found if s.kind in (Kind.FORWARD, Kind.BACKWARD)]
            begin, end = passes[0].begin, passes[-1].end  # a later stage waits for its first microbatch before
            waits = sum(s.end - s.begin for s in found if s.kind.is_wait and s.begin < end and s.end > begin)
            busy = sum(s.end - s.begin for s in passes)
            left = end - begin - busy - waits
            inside, between = inside + busy, between + left
            for span in passes:
                runs[span.chunk, span.backward].append(span.end - span.begin + left / len(passes))
    chunks = range(layout_of(run).num_chunks)
    transfers = _transfers(recording, chosen)
    forward_edges, backward_edges = (
        [mean(transfers[chunk, backward]) / 1e6 for chunk in chunks[1:]] for backward in (False, True)
    )
    costs = Costs(
        forward=[mean(runs[chunk, False]) / 1e6 for chunk in chunks],
        backward=[mean(runs[chunk, True]) / 1e6 for chunk in chunks],
        forward_edges=forward_edges,
        backward_edges=backward_edges,
    )
    return Calibration(run, recording.ranks[0].world_size, costs, inside / (inside + between))


def _transfers(recording: Recording, steps: set[int]) -> dict[tuple[int, bool], list[float]]:
    """Microseconds of each edge's messages that a receiver was waiting for when they came; where there were none, of
    the fastest that came while it computed."""
    waits = {
        Key.of(record, span): span
        for record in recording.ranks
        for span in record.spans
        if span.kind is Kind.WAIT_RECEIVE
    }
    awaited: dict[tuple[int, bool], list[float]] = defaultdict(list)
    every: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for key, message in messages(recording).items():
        transfer, wait = message.transfer, waits.get(key)
        if key.step not in steps or transfer is None:
            continue
        assert message.send and message.receive
        every[key.chunk, key.backward].append(transfer)
        if wait and wait.begin <= max(message.send.span.begin, message.receive.span.begin):
            awaited[key.chunk, key.backward].append(transfer)
    return {edge: awaited[edge] or [min(times)] for edge, times in every.items()}
