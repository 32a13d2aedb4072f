"""How long a schedule takes, event by event.

A message starts once it is sent and received and the one before it on its way (same sender, receiver and direction) is
through; then it takes its edge's time, whatever else is on the wire. A stage runs one chunk at a time, and messages do
not slow it. Which stage is looked at first changes nothing, so each runs until it must wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, microbatch_group, microbatches
from depthbench.pipeline.message import Label

from .schedule import Action, Compute, Wait, schedule


@dataclass(frozen=True)
class Costs:
    """Seconds. forward, backward: of one microbatch, a chunk. forward_edges, backward_edges: of a message, an edge;
    edge c lies between chunks c and c + 1."""

    forward: Sequence[float]
    backward: Sequence[float]
    forward_edges: Sequence[float]
    backward_edges: Sequence[float]


@dataclass(frozen=True, slots=True)
class Span:
    """One run of a chunk. begin, end: seconds from the start of the pass."""

    stage: int
    chunk: int
    microbatch: int
    backward: bool
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """seconds: until the last stage is done. busy: seconds each stage computes. exposed: seconds each stage waits while
    the message that it waits for is on its way. timeline: stage by stage, in order."""

    seconds: float
    busy: tuple[float, ...]
    exposed: tuple[float, ...]
    timeline: tuple[Span, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the pass in which each stage does not compute."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle share of all stages' time, 0 to 1."""
        whole = self.seconds * len(self.busy)
        return 1 - sum(self.busy) / whole if whole else 0.0


class _Network:
    """Messages between stages. One is known to be through when both of its ends have come to it: those before it on
    its way then are, since both ends keep their order."""

    def __init__(self, costs: Costs, stages: int) -> None:
        self.edges, self.stages = (costs.forward_edges, costs.backward_edges), stages
        self.met: dict[Label, float] = {}
        self.times: dict[Label, tuple[float, float]] = {}
        self.free: dict[tuple[bool, int], float] = {}

    def post(self, label: Label, clock: float) -> None:
        """One end has come to the message; the second of them sets when it begins and ends."""
        other = self.met.pop(label, None)
        if other is None:
            self.met[label] = clock
            return
        way = label.backward, label.receiver % self.stages
        begin = max(clock, other, self.free.get(way, 0.0))
        end = begin + self.edges[label.backward][label.receiver - 1]
        self.free[way] = end
        self.times[label] = begin, end


@dataclass(slots=True)
class _Stage:
    """at: the next action. clock, busy, exposed: seconds so far. awaited: the message that it waited for last."""

    number: int
    actions: Sequence[Action]
    at: int = 0
    clock: float = 0.0
    busy: float = 0.0
    exposed: float = 0.0
    awaited: Label | None = None
    spans: list[Span] = field(default_factory=list)

    def run(self, network: _Network, computing: tuple[Sequence[float], Sequence[float]]) -> bool:
        """Go on until it must wait for what is not known yet. Returns whether it came any further."""
        before, clock, times = self.at, self.clock, network.times
        for at in range(before, len(self.actions)):
            action = self.actions[at]
            if isinstance(action, Compute):
                seconds = computing[action.backward][action.chunk]
                self.spans.append(
                    Span(self.number, action.chunk, action.microbatch, action.backward, clock, clock + seconds)
                )
                self.busy += seconds
                clock += seconds
            elif isinstance(action, Wait):
                self.awaited = action.label
                known = times.get(action.label)
                if known is None:
                    break
                begin, end = known
                if end > clock:
                    self.exposed += end - max(begin, clock)
                    clock = end
            else:
                network.post(action.label, clock)
            self.at = at + 1
        self.clock = clock
        return self.at > before


def simulate(stages: Sequence[Sequence[Action]], costs: Costs) -> Simulation:
    """stages: each one's actions, from `schedule`. Raises RuntimeError, naming what every stage waits for, if they wait
    for each other for ever."""
    network = _Network(costs, len(stages))
    everyone = [_Stage(number, actions) for number, actions in enumerate(stages)]
    while running := [stage for stage in everyone if stage.at < len(stage.actions)]:
        moved = [stage.run(network, (costs.forward, costs.backward)) for stage in running]
        if not any(moved):
            waits = (f"stage {stage.number} for the {stage.awaited}" for stage in running)
            raise RuntimeError(f"the schedule never ends; what waits: {', '.join(waits)}")
    return Simulation(
        seconds=max(stage.clock for stage in everyone),
        busy=tuple(stage.busy for stage in everyone),
        exposed=tuple(stage.exposed for stage in everyone),
        timeline=tuple(span for stage in everyone for span in stage.spans),
    )


def simulate_pass(run: RunConfig, world_size: int, costs: Costs) -> Simulation:
    """The forward and backward pass of one step of a run that `check_run` has nothing against."""
    count, overlap = microbatches(run, world_size), run.pipeline.overlap_p2p
    return simulate(schedule(layout_of(run), count, microbatch_group(run), overlap_p2p=overlap), costs)
