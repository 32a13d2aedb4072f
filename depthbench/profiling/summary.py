"""What an analysis found, as objects and as plain data for JSON. Times in microseconds."""

from dataclasses import asdict, dataclass
from typing import Any

from .parts import Part


@dataclass(frozen=True)
class RankSummary:
    """step: median over the steps. parts: of a step, mean over the steps; they add up to a mean step. memory_bytes,
    cache_bytes: peaks, None where unknown. cache_hit_bytes, sent_bytes: of a step, mean."""

    rank: int
    data: int
    pipeline: int
    tensor: int
    host: str
    device: str
    clock_error: float
    step: float
    parts: dict[Part, float]
    memory_bytes: int | None
    cache_bytes: int
    planned_cache_bytes: int | None
    planned_memory: int | None
    cache_hit_bytes: float
    sent_bytes: float

    @property
    def busy(self) -> float:
        return sum(time for part, time in self.parts.items() if part.is_busy)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (stage {self.pipeline}, data {self.data}, tensor {self.tensor})"


@dataclass(frozen=True)
class EdgeSummary:
    """One direction between two chunks, over all steps and replicas.

    sender, receiver: chunks; a backward edge leads from the later chunk to the earlier one. bytes, tensors: of the
    largest message, which is a microbatch's, one tensor-parallel rank's; planned_bytes and the next two: what the plan
    says of it, None without one. as_planned: whether every message had the planned bytes. transfer, worst: median and
    longest time from both ends posted to received; gigabytes_per_second: at the median, so at least. exposed, idle:
    what the receiving stage waited for one message, mean, after and before it was sent. None where no message shows it.
    """

    sender: int
    receiver: int
    direction: str
    sender_stage: int
    receiver_stage: int
    messages: int
    tensors: int
    bytes: int
    planned_bytes: int | None
    bytes_without_cache: int | None
    bytes_paper: int | None
    as_planned: bool | None
    transfer: float | None
    worst: float | None
    gigabytes_per_second: float | None
    exposed: float | None
    idle: float | None

    @property
    def name(self) -> str:
        return f"{self.sender} → {self.receiver}"


@dataclass(frozen=True)
class StepSummary:
    """length: the longest rank's. pass_begin, pass_end: from the first forward's begin to the last backward's end, over
    all ranks. bubble: 1 - (forward and backward time of all ranks) / (ranks x pass): the share of the pass in which
    ranks do not compute, which is what a plan's bubble is."""

    step: int
    length: float
    pass_begin: float
    pass_end: float
    bubble: float


@dataclass(frozen=True)
class Summary:
    """step: median length of a step. passing: shares of the ranks' time in the passes of all steps, adding up to 1;
    what is neither forward nor backward of them is `bubble`. exposed: the transfer share of it. clock_error: the worst
    rank's; shorter times mean nothing. sent_bytes and the next two: of a step, all ranks, forward and backward; None
    without a plan."""

    run: str
    architecture: str
    world_size: int
    missing: list[int]
    step: float
    planned_step: float | None
    tokens_per_second: float
    bubble: float
    planned_bubble: float | None
    exposed: float
    passing: dict[Part, float]
    clock_error: float
    sent_bytes: float
    sent_without_cache: float | None
    sent_paper: float | None
    steps: list[StepSummary]
    ranks: list[RankSummary]
    edges: list[EdgeSummary]

    @property
    def memory_bytes(self) -> int | None:
        """The fullest rank's peak."""
        return max((rank.memory_bytes for rank in self.ranks if rank.memory_bytes is not None), default=None)

    @property
    def cache_bytes(self) -> int:
        """The fullest rank's peak."""
        return max(rank.cache_bytes for rank in self.ranks)

    @property
    def cache_hit_bytes(self) -> float:
        """Of a step, all ranks."""
        return sum(rank.cache_hit_bytes for rank in self.ranks)

    @property
    def typical_step(self) -> int:
        """Number of the step of median length; of two, the shorter one."""
        return sorted(self.steps, key=lambda step: step.length)[(len(self.steps) - 1) // 2].step

    @property
    def slowest_ranks(self) -> list[RankSummary]:
        """Those that compute longest first: they hold up the others."""
        return sorted(self.ranks, key=lambda rank: -rank.busy)

    @property
    def slowest_edges(self) -> list[EdgeSummary]:
        """By median transfer, longest first; without those that show none."""
        return sorted(
            (edge for edge in self.edges if edge.transfer is not None), key=lambda edge: -(edge.transfer or 0)
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; all times in microseconds."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.value if isinstance(key, Part) else key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
