"""What a recording holds: for each rank a list of spans on one clock, in one JSON file a rank."""

import enum
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from depthbench.errors import UserError

FORMAT = 1
PLAN = "plan.json"
_RANK = "rank-{:05d}.json"


class Kind(enum.Enum):
    """What a span is.

    STEP: a whole optimizer step; every other span of the rank lies within one. Its parts on the computing thread, which
    nest in it and do not overlap: DATA (the loader), FORWARD and BACKWARD (a microbatch through a chunk), WAIT_RECEIVE
    and WAIT_SEND (blocked until a message is through), REDUCE (data-parallel and tied gradients after the passes, and
    the loss), OPTIMIZER (clipping, update, gathering of weights). Beside it, overlapping anything: SEND and RECEIVE, a
    message from when it was posted to when it was seen to be through.
    """

    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT_RECEIVE = "wait_receive"
    WAIT_SEND = "wait_send"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"
    SEND = "send"
    RECEIVE = "receive"

    @property
    def is_message(self) -> bool:
        return self in (Kind.SEND, Kind.RECEIVE)

    @property
    def is_wait(self) -> bool:
        return self in (Kind.WAIT_RECEIVE, Kind.WAIT_SEND)


@dataclass(frozen=True)
class Span:
    """Times in microseconds since the recording began, on rank 0's clock.

    step: number of the optimizer step, from 1. chunk, microbatch: of FORWARD and BACKWARD; of messages and waits, chunk
    is the later of the two that the message lies between (forward chunk - 1 to chunk, backward the other way), and
    `backward` its direction. bytes, tensors: of a message, its header not counted.
    """

    kind: Kind
    begin: float
    end: float
    step: int
    chunk: int = -1
    microbatch: int = -1
    backward: bool = False
    bytes: int = 0
    tensors: int = 0


@dataclass(frozen=True)
class RankRecord:
    """One rank's recording.

    data, pipeline, tensor: its place in the layout; pipeline is the stage. clock_error: microseconds by which its clock
    may be off rank 0's. memory_bytes: the peak that a device's allocator has held in the process, the steps before the
    recorded ones included; None where none can be asked.
    cache_bytes: the history cache's peak. cache_hit_bytes: history that chunks took from the cache, all steps. tokens:
    of each recorded step, over all ranks.
    """

    rank: int
    world_size: int
    data: int
    pipeline: int
    tensor: int
    host: str
    device: str
    clock_error: float
    memory_bytes: int | None
    cache_bytes: int
    cache_hit_bytes: int
    tokens: list[int]
    spans: list[Span]


@dataclass(frozen=True)
class Recording:
    """ranks: those found, in order; missing: the numbers of the others. plan: what was planned (`planning.plan`'s
    `as_dict`, with the run's settings for its name); None where rank 0 left none."""

    folder: Path
    ranks: list[RankRecord]
    missing: list[int]
    plan: dict[str, Any] | None


def save_rank(folder: Path, record: RankRecord) -> None:
    """Spans as columns."""
    columns: dict[str, list[Any]] = {
        field.name: [getattr(span, field.name) for span in record.spans] for field in fields(Span)
    }
    columns["kind"] = [kind.value for kind in columns["kind"]]
    columns["begin"] = [round(time, 3) for time in columns["begin"]]
    columns["end"] = [round(time, 3) for time in columns["end"]]
    plain = {name: value for name, value in vars(record).items() if name != "spans"}
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _RANK.format(record.rank), json.dumps({"format": FORMAT, **plain, "spans": columns}))


def save_plan(folder: Path, plan: dict[str, Any]) -> None:
    _write(folder / PLAN, json.dumps(plan, indent=1))


def _write(path: Path, text: str) -> None:
    """Wholly or not at all."""
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    scratch.rename(path)


def load_recording(folder: Path) -> Recording:
    """Raises UserError where there is no recording, or one that this version cannot read."""
    files = sorted(folder.glob("rank-*.json"))
    if not files:
        raise UserError(f"{folder} holds no recording (rank-00000.json and so on); `depthbench profile RUN` makes one")
    ranks = [_load_rank(path) for path in files]
    found = {record.rank for record in ranks}
    missing = [rank for rank in range(max(record.world_size for record in ranks)) if rank not in found]
    return Recording(folder, ranks, missing, _load_plan(folder / PLAN))


def _load_plan(path: Path) -> dict[str, Any] | None:
    try:
        plan: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    except ValueError as error:
        raise UserError(f"{path} is no plan ({error}): delete it to go without, or record again") from error
    return plan


def _load_rank(path: Path) -> RankRecord:
    try:
        content = json.loads(path.read_text())
        if (found := content.pop("format")) != FORMAT:
            raise ValueError(f"its format is {found}, this version of depthbench reads {FORMAT}")
        columns = content.pop("spans")
        columns["kind"] = [Kind(kind) for kind in columns["kind"]]
        rows = zip(*(columns[field.name] for field in fields(Span)), strict=True)
        return RankRecord(**content, spans=[Span(*row) for row in rows])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no rank's recording ({error!r}): delete it, or record again") from error
