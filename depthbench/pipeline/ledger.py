"""What was really sent over each edge."""

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """tensors: as many as the plan packs on the edge; that no others are in the messages, their size says. bytes: of
    tensors. header_bytes: of headers, beside them."""

    messages: int = 0
    tensors: int = 0
    bytes: int = 0
    header_bytes: int = 0


@dataclass
class Ledger:
    """Of one stage: what it has sent since the last `clear`, by (receiving chunk of the edge, backward)."""

    sent: dict[tuple[int, bool], Traffic] = field(default_factory=dict)

    def note(self, receiver: int, backward: bool, tensors: int, size: int, header: int) -> None:
        traffic = self.sent.setdefault((receiver, backward), Traffic())
        traffic.messages += 1
        traffic.tensors += tensors
        traffic.bytes += size
        traffic.header_bytes += header

    def clear(self) -> None:
        self.sent.clear()
