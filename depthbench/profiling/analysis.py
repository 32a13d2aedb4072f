"""From a recording to its numbers. See `summary.py` for what each one is."""

from collections import defaultdict
from collections.abc import Iterable
from statistics import mean, median

from depthbench.errors import UserError

from .events import Kind, RankRecord, Recording, Span
from .parts import Message, Messages, Part, Piece, messages, pieces
from .planned import EdgeKey, Planned, num_stages, planned
from .summary import EdgeSummary, RankSummary, StepSummary, Summary


def summarize(recording: Recording) -> Summary:
    """Over the steps that every rank finished. Ranks without a finished step count as missing.

    Raises UserError where there is no such step.
    """
    finished = [record for record in recording.ranks if _steps(record)]
    common = set.intersection(*(set(_steps(record)) for record in finished)) if finished else set()
    if not common:
        raise UserError(f"{recording.folder} holds no step that its ranks finished; record again, with more steps")
    plan, among = planned(recording), messages(recording)
    timed = [_Rank(record, [p for p in pieces(record, among) if p.span.step in common]) for record in finished]
    steps = [_step(number, timed) for number in sorted(common)]
    available = len(timed) * sum(step.pass_end - step.pass_begin for step in steps)
    passing = {part: time / (available or 1) for part, time in _in_passes(timed, steps).items()}
    passing[Part.OTHER] = max(0.0, 1 - sum(passing.values()))
    ranks = [_rank_summary(one, sorted(common), plan) for one in timed]
    carried = {key: message for key, message in among.items() if key.step in common}
    found = _edges(recording, timed, carried, plan)
    length = median(step.length for step in steps)
    tokens = median(max(record.tokens, default=0) for record in finished)
    missing = {*recording.missing, *(record.rank for record in recording.ranks if record not in finished)}

    def sent(scheme: str) -> float | None:
        sizes = [(edge.messages, getattr(edge, scheme)) for edge in found if edge.messages]
        known = [count * size for count, size in sizes if size is not None]
        return sum(known) / len(steps) if len(known) == len(sizes) else None

    return Summary(
        run=plan.run,
        architecture=plan.architecture,
        world_size=max(record.world_size for record in recording.ranks),
        missing=sorted(missing),
        step=length,
        planned_step=None if plan.step_seconds is None else 1e6 * plan.step_seconds,
        tokens_per_second=1e6 * tokens / length if length else 0.0,
        bubble=1 - sum(share for part, share in passing.items() if part.is_busy),
        planned_bubble=plan.bubble,
        exposed=passing.get(Part.TRANSFER, 0.0),
        passing=passing,
        clock_error=max(record.clock_error for record in recording.ranks),
        sent_bytes=sum(message.known.bytes for message in carried.values()) / len(steps),
        sent_without_cache=sent("bytes_without_cache"),
        sent_paper=sent("bytes_paper"),
        steps=steps,
        ranks=ranks,
        edges=found,
    )


class _Rank:
    def __init__(self, record: RankRecord, found: list[Piece]) -> None:
        self.record = record
        self.lengths = _steps(record)
        self.by_step: dict[int, list[Piece]] = defaultdict(list)
        for piece in found:
            self.by_step[piece.span.step].append(piece)


def _steps(record: RankRecord) -> dict[int, float]:
    """The length of each finished step."""
    return {span.step: span.end - span.begin for span in record.spans if span.kind is Kind.STEP}


def _step(number: int, timed: list[_Rank]) -> StepSummary:
    length = max(one.lengths[number] for one in timed)
    busy = [piece for one in timed for piece in one.by_step[number] if piece.part.is_busy]
    begin, end = min((p.begin for p in busy), default=0.0), max((p.end for p in busy), default=0.0)
    available = len(timed) * (end - begin)
    return StepSummary(number, length, begin, end, 1 - sum(p.length for p in busy) / available if available else 0.0)


def _in_passes(timed: list[_Rank], steps: list[StepSummary]) -> dict[Part, float]:
    """Microseconds of each part within the passes, all ranks and steps together."""
    times = dict.fromkeys(Part, 0.0)
    for step in steps:
        for one in timed:
            for piece in one.by_step[step.step]:
                times[piece.part] += piece.within(step.pass_begin, step.pass_end)
    return {part: time for part, time in times.items() if part is not Part.OTHER}


def _of_stage(sizes: list[int], stage: int) -> int | None:
    return sizes[stage] if stage < len(sizes) else None


def _rank_summary(one: _Rank, steps: list[int], plan: Planned) -> RankSummary:
    record, lengths = one.record, [one.lengths[number] for number in steps]
    parts = dict.fromkeys(Part, 0.0)
    for number in steps:
        for piece in one.by_step[number]:
            parts[piece.part] += piece.length / len(steps)
    parts[Part.OTHER] = max(0.0, mean(lengths) - sum(parts.values()))
    sent = sum(span.bytes for span in record.spans if span.kind is Kind.SEND and span.step in steps)
    return RankSummary(
        rank=record.rank,
        data=record.data,
        pipeline=record.pipeline,
        tensor=record.tensor,
        host=record.host,
        device=record.device,
        clock_error=record.clock_error,
        step=median(lengths),
        parts=parts,
        memory_bytes=record.memory_bytes,
        cache_bytes=record.cache_bytes,
        planned_cache_bytes=_of_stage(plan.cache_bytes, record.pipeline),
        planned_memory=_of_stage(plan.memory, record.pipeline),
        cache_hit_bytes=record.cache_hit_bytes / len(one.lengths),
        sent_bytes=sent / len(steps),
    )


def _edges(recording: Recording, timed: list[_Rank], among: Messages, plan: Planned) -> list[EdgeSummary]:
    """Forward edges in depth order, then backward ones in reverse, those without a message too."""
    stages = num_stages(recording)
    by_edge: dict[EdgeKey, list[Message]] = {key: [] for key in plan.edges}
    for key, message in among.items():
        by_edge.setdefault((key.chunk, key.backward), []).append(message)
    waited: dict[EdgeKey, list[Piece]] = defaultdict(list)
    for piece in (piece for one in timed for found in one.by_step.values() for piece in found):
        if piece.span.kind is Kind.WAIT_RECEIVE:
            waited[piece.span.chunk, piece.span.backward].append(piece)
    ordered = sorted(by_edge, key=lambda edge: (edge[1], -edge[0] if edge[1] else edge[0]))
    return [_edge(edge, by_edge[edge], waited[edge], plan.edges.get(edge, {}), stages) for edge in ordered]


def _edge(edge: EdgeKey, carried: list[Message], waited: list[Piece], plan: dict[str, int], stages: int) -> EdgeSummary:
    chunk, backward = edge
    sender, receiver = (chunk, chunk - 1) if backward else (chunk - 1, chunk)
    known: list[Span] = [message.known for message in carried]
    size, expected = max((span.bytes for span in known), default=0), plan.get("bytes")
    times = [time for message in carried if (time := message.transfer) is not None]
    typical = median(times) if times else None
    received = [message for message in carried if message.receive is not None]

    def waiting(part: Part) -> float | None:
        return _total(piece for piece in waited if piece.part is part) / len(received) if received else None

    return EdgeSummary(
        sender=sender,
        receiver=receiver,
        direction="backward" if backward else "forward",
        sender_stage=sender % stages,
        receiver_stage=receiver % stages,
        messages=len(carried),
        tensors=max((span.tensors for span in known), default=0),
        bytes=size,
        planned_bytes=expected,
        bytes_without_cache=plan.get("bytes_without_cache"),
        bytes_paper=plan.get("bytes_paper"),
        as_planned=all(span.bytes == expected for span in known) if known and expected is not None else None,
        transfer=typical,
        worst=max(times, default=None),
        gigabytes_per_second=size / typical / 1e3 if typical else None,
        exposed=waiting(Part.TRANSFER),
        idle=waiting(Part.IDLE),
    )


def _total(found: Iterable[Piece]) -> float:
    return sum(piece.length for piece in found)
