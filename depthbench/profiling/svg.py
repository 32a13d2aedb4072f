"""One step of a recording as an inline SVG. Positions are percentages, so a page zooms by making it wider."""

from html import escape

from .parts import Key, Message, Piece
from .style import css_class
from .units import duration, size, time_unit
from .view import Row, View, ticks

_ROW, _GAP, _TOP = 34, 8, 26
_WAIT = 26
"""Pixels. Waits and the rest are lower than what computes."""
_PIXELS = 980
"""How wide the drawing is, more or less, before a page zooms: numbers that do not fit at it begin hidden."""


def row_labels(shown: View) -> str:
    """Their column, left of the drawing."""
    rows = (f'<div class="row-label">stage {row.stage}</div>' for row in shown.rows)
    return f'<div class="row-labels" style="padding-top:{_TOP}px">{"".join(rows)}</div>'


def timeline_svg(shown: View, length: float, mark: tuple[float, float] | None) -> str:
    """length: microseconds that the width stands for. mark: begin and end of the pass, in the recording's time."""
    draw = _Drawing(shown, length)
    height = _TOP + len(shown.rows) * (_ROW + _GAP)
    label = f"Timeline of step {shown.step}: one row a stage"
    parts = [f'<svg class="timeline" height="{height}" role="img" aria-label="{label}">', *draw.axis(height)]
    if mark is not None:
        parts += draw.bracket(*mark)
    for number, row in enumerate(shown.rows):
        parts += draw.row(row, _TOP + number * (_ROW + _GAP))
    parts += (line for key, message in shown.messages.items() for line in draw.message(key, message))
    return "".join([*parts, "</svg>"])


class _Drawing:
    def __init__(self, shown: View, length: float) -> None:
        self.shown, self.length, self.stages = shown, length, len(shown.rows)

    def at(self, time: float) -> float:
        """In percent."""
        return 100 * (time - self.shown.begin) / self.length

    def axis(self, height: int) -> list[str]:
        unit, name = time_unit(self.length)
        parts = []
        for tick in ticks(self.length / unit):
            x = f"{100 * tick * unit / self.length:.3f}%"
            parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{height}"/>')
            if tick * unit < 0.97 * self.length:
                parts.append(f'<text class="tick" x="{x}" dx="3" y="11">{tick:g} {name}</text>')
        return parts

    def bracket(self, begin: float, end: float) -> list[str]:
        where = f'x="{self.at(begin):.3f}%" width="{self.at(end) - self.at(begin):.3f}%"'
        title = f"the pass: {duration(end - begin)}, over which the bubble is counted"
        return [f'<rect class="pass" {where} y="{_TOP - 9}" height="3"><title>{title}</title></rect>']

    def row(self, row: Row, y: int) -> list[str]:
        parts = [f'<rect class="lane" x="0" width="100%" y="{y}" height="{_ROW}"/>']
        if row.record is None:
            parts.append(f'<text class="absent" x="50%" y="{y + 21}">no recording of this rank</text>')
        for piece in row.pieces:
            parts += self.box(row, piece, y)
        return parts

    def box(self, row: Row, piece: Piece, y: int) -> list[str]:
        x, width = self.at(piece.begin), 100 * piece.length / self.length
        busy, span = piece.part.is_busy, piece.span
        look = f"{css_class(piece.part)} v{span.chunk // self.stages}" if busy else css_class(piece.part)
        of = f' data-m="{span.microbatch}"' if span.microbatch >= 0 else ""
        high = _ROW if busy else _WAIT
        where = f'x="{x:.3f}%" y="{y + (_ROW - high) // 2}" width="{width:.3f}%" height="{high}"'
        parts = [f'<rect class="{look}"{of} {where}><title>{self.tooltip(row, piece)}</title></rect>']
        if busy:
            label = str(span.microbatch)
            hidden = " small" if width / 100 * _PIXELS < 7 * len(label) + 4 else ""
            middle = f'x="{x + width / 2:.3f}%" y="{y + _ROW // 2 + 4}"'
            parts.append(f'<text class="number {look}{hidden}" data-w="{width:.4f}" {middle}>{label}</text>')
        return parts

    def tooltip(self, row: Row, piece: Piece) -> str:
        span = piece.span
        said = piece.part.value
        if span.microbatch >= 0:
            said += f", microbatch {span.microbatch}"
        lines = [f"{said}, chunk {span.chunk}" if piece.part.is_busy else said, duration(piece.length)]
        if span.kind.is_wait:
            direction = "backward" if span.backward else "forward"
            lines.append(f"for the {direction} message between chunks {span.chunk - 1} and {span.chunk}")
        if row.record is not None:
            lines.append(f"stage {row.stage}, rank {row.record.rank} on {row.record.host}")
        lines.append(f"{duration(piece.begin - self.shown.begin)} after the step began")
        return escape("\n".join(lines))

    def message(self, key: Key, message: Message) -> list[str]:
        if message.send is None or message.receive is None:
            return []
        rows = [end.record.pipeline for end in (message.send, message.receive)]
        tops = [_TOP + row * (_ROW + _GAP) + _ROW // 2 for row in rows]
        ends = (message.send.span.begin, message.receive.span.end)
        line = " ".join(
            f'x{number}="{self.at(time):.3f}%" y{number}="{top}"'
            for number, (time, top) in enumerate(zip(ends, tops, strict=True), 1)
        )
        said = f"{size(message.known.bytes)}, {duration(message.transfer)} after both ends were posted"
        way = "backward" if key.backward else "forward"
        title = f"{way} message of microbatch {key.microbatch} between chunks {key.chunk - 1} and {key.chunk}: {said}"
        return [f'<line class="message" data-m="{key.microbatch}" {line}><title>{title}</title></line>']
