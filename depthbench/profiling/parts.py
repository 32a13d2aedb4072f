"""What each stretch of a rank's time was: computing, waiting for a peer, waiting for bytes, and the rest."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from .events import Kind, RankRecord, Recording, Span


class Part(enum.Enum):
    """FORWARD, BACKWARD: busy. IDLE: a wait while the peer had not posted its end of the message. TRANSFER: a wait
    after both had: exposed communication. UNKNOWN: a wait whose peer left no recording. OTHER: of a step, under no
    span."""

    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"
    TRANSFER = "transfer"
    UNKNOWN = "unknown wait"
    DATA = "data"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"
    OTHER = "other"

    @property
    def is_busy(self) -> bool:
        return self in (Part.FORWARD, Part.BACKWARD)


_PART_OF = {kind: Part(kind.value) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.DATA, Kind.REDUCE, Kind.OPTIMIZER)}


@dataclass(frozen=True)
class Key:
    """What both ends of a message agree on, over the whole recording."""

    data: int
    tensor: int
    step: int
    chunk: int
    microbatch: int
    backward: bool

    @classmethod
    def of(cls, record: RankRecord, span: Span) -> "Key":
        return cls(record.data, record.tensor, span.step, span.chunk, span.microbatch, span.backward)


@dataclass(frozen=True)
class End:
    """One rank's view of a message."""

    record: RankRecord
    span: Span


@dataclass(frozen=True)
class Message:
    """Either end is None where that rank left no recording, never both."""

    send: End | None
    receive: End | None

    @property
    def known(self) -> Span:
        """A span that has its bytes and tensors."""
        end = self.send or self.receive
        assert end is not None, "a message has an end"
        return end.span

    @property
    def transfer(self) -> float | None:
        """Microseconds from when both ends were posted to when the receiver saw it through; None without both ends.
        The message itself took that at most: a receiver that computes meanwhile sees it late."""
        if self.send is None or self.receive is None:
            return None
        posted = max(self.send.span.begin, self.receive.span.begin)
        return max(0.0, self.receive.span.end - posted)


Messages = dict[Key, Message]


def messages(recording: Recording) -> Messages:
    """Every message, its two ends together."""
    ends: dict[Kind, dict[Key, End]] = {Kind.SEND: {}, Kind.RECEIVE: {}}
    for record in recording.ranks:
        for span in record.spans:
            if span.kind.is_message:
                ends[span.kind][Key.of(record, span)] = End(record, span)
    sent, received = ends[Kind.SEND], ends[Kind.RECEIVE]
    return {key: Message(sent.get(key), received.get(key)) for key in dict.fromkeys([*sent, *received])}


@dataclass(frozen=True)
class Piece:
    """A part of a span, from begin to end in microseconds."""

    part: Part
    begin: float
    end: float
    span: Span

    @property
    def length(self) -> float:
        return self.end - self.begin

    def within(self, begin: float, end: float) -> float:
        """Its length between two times."""
        return max(0.0, min(self.end, end) - max(self.begin, begin))


def pieces(record: RankRecord, among: Messages) -> Iterator[Piece]:
    """What the rank's computing thread did, in the order of its spans, without empty pieces. OTHER is what these
    leave."""
    for span in record.spans:
        if span.kind.is_wait:
            yield from wait_pieces(record, span, among)
        elif span.kind in _PART_OF and span.end > span.begin:
            yield Piece(_PART_OF[span.kind], span.begin, span.end, span)


def wait_pieces(record: RankRecord, wait: Span, among: Messages) -> Iterator[Piece]:
    """Its idle and its transfer part, or all of it unknown."""
    message = among.get(Key.of(record, wait))
    peer = message and (message.send if wait.kind is Kind.WAIT_RECEIVE else message.receive)
    posted = min(max(wait.begin, peer.span.begin), wait.end) if peer else wait.begin
    after = Part.TRANSFER if peer else Part.UNKNOWN
    for part, begin, end in ((Part.IDLE, wait.begin, posted), (after, posted, wait.end)):
        if end > begin:
            yield Piece(part, begin, end, wait)
