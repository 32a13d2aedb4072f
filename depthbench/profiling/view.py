"""What a timeline shows: one step of the ranks of one replica, stage by stage."""

from dataclasses import dataclass

from .events import RankRecord, Recording
from .parts import Messages, Piece, messages, pieces
from .planned import num_stages


@dataclass(frozen=True)
class Row:
    """A stage in a step. record: None where its rank is missing. pieces: without waits of no length."""

    stage: int
    record: RankRecord | None
    pieces: list[Piece]


@dataclass(frozen=True)
class View:
    """One step of the replica data=0, tensor=0 (of those there are, the first). begin, end: of the step, over its
    ranks. rounds: chunks a stage."""

    step: int
    data: int
    tensor: int
    begin: float
    end: float
    rounds: int
    rows: list[Row]
    messages: Messages


def view(recording: Recording, step: int) -> View:
    """Empty rows where no rank of that replica has a span of the step."""
    stages = num_stages(recording)
    data, tensor = min((record.data, record.tensor) for record in recording.ranks)
    shown = {record.pipeline: record for record in recording.ranks if (record.data, record.tensor) == (data, tensor)}
    among = messages(recording)
    spans = [span for record in shown.values() for span in record.spans if span.step == step]
    rows = [
        Row(stage, record, [piece for piece in pieces(record, among) if piece.span.step == step] if record else [])
        for stage in range(stages)
        for record in [shown.get(stage)]
    ]
    busy = [piece for row in rows for piece in row.pieces if piece.part.is_busy]
    return View(
        step=step,
        data=data,
        tensor=tensor,
        begin=min((span.begin for span in spans), default=0.0),
        end=max((span.end for span in spans), default=1.0),
        rounds=1 + max((piece.span.chunk for piece in busy), default=0) // stages,
        rows=rows,
        messages={key: one for key, one in among.items() if (key.step, key.data, key.tensor) == (step, data, tensor)},
    )


def ticks(length: float) -> list[float]:
    """Round numbers from 0 to `length`, ten or so."""
    power = 10.0 ** (len(f"{length:.0f}") - 2)
    step = next(power * factor for factor in (0.5, 1, 2, 5, 10, 20) if length <= 12 * power * factor)
    return [step * count for count in range(int(length / step) + 1)]
