"""A self-contained HTML page: its head, its look, and the few lines of script that its timelines need."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from .parts import Part
from .style import COLORS, MEANINGS, css_class, fill, ink

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The page may not load anything, and a browser holds it to that."""


def page(title: str, body: str, rounds: int) -> str:
    """title: plain text. body: HTML. rounds: chunks a stage, which differ in shade."""
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_CSS}{_colors(rounds)}</style>"
    )
    content = f"<main>\n{body}\n</main><script>{_JS}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{content}</body></html>\n'


def header(title: str, lead: str, warning: str) -> str:
    """title, lead: plain text. warning: HTML."""
    said = f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>'
    return f'<header><div class="over">depthbench profile</div>{said}{warning}</header>'


@dataclass(frozen=True)
class Cell:
    """content: HTML. number: aligned as one. good: coloured as right or wrong, None as neither."""

    content: str
    number: bool = True
    good: bool | None = None


def text(content: object) -> Cell:
    """Of anything that comes from a file."""
    return Cell(escape(str(content)), number=False)


def table(head: Iterable[str], rows: Iterable[list[Cell]]) -> str:
    """head: plain text; a column is aligned as its first row."""
    listed = list(rows)
    numbers = [cell.number for cell in listed[0]] if listed else []
    headings = "".join(
        f"<th{' class=n' if number else ''}>{escape(name)}</th>"
        for name, number in zip(head, numbers, strict=bool(listed))
    )
    lines = ("".join(f"<td{_cell_class(cell)}>{cell.content}</td>" for cell in row) for row in listed)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell_class(cell: Cell) -> str:
    verdict = {True: "good", False: "bad", None: ""}[cell.good]
    names = f"{'n' if cell.number else ''} {verdict}".strip()
    return f' class="{names}"' if names else ""


def tile(label: str, value: str, note: str) -> str:
    """A headline number; all plain text."""
    return (
        f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
    )


def section(title: str, note: str, content: str) -> str:
    """note: plain text. content: HTML."""
    said = f'<p class="about">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{said}{content}</section>"


def legend(parts: Iterable[Part], rounds: int = 1) -> str:
    """rounds: chunks a stage that are told apart by their shade."""
    items = (f"<span>{''.join(_keys(part, rounds))}{escape(MEANINGS[part])}</span>" for part in parts)
    return f'<div class="legend">{"".join(items)}</div>'


def _keys(part: Part, rounds: int) -> Iterable[str]:
    if not part.is_busy:
        return [f'<i class="key {css_class(part)}"></i>']
    return (f'<i class="key" style="background:{fill(part, round_, rounds)}"></i>' for round_ in range(rounds))


def bar(shares: Iterable[tuple[Part, float, str]]) -> str:
    """Stacked. (part, its fraction of the whole width, what its tooltip says)."""
    pieces = (
        f'<i class="{css_class(part)}" style="width:{100 * fraction:.3f}%" title="{escape(said)}"></i>'
        for part, fraction, said in shares
        if fraction > 0
    )
    return f'<div class="bar">{"".join(pieces)}</div>'


def _colors(rounds: int) -> str:
    rules = [f".{css_class(part)}{{fill:{color};background:{color}}}" for part, color in COLORS.items()]
    for part in (Part.FORWARD, Part.BACKWARD):
        for round_ in range(rounds):
            color = fill(part, round_, rounds)
            rules.append(f"svg .{part.value}.v{round_}{{fill:{color}}}")
            rules.append(f"svg text.{part.value}.v{round_}{{fill:{ink(color)}}}")
    return "\n".join(rules) + _HATCHED


_HATCHED = """
svg .idle{fill:url(#idle)} svg .unknown-wait{fill:url(#unknown)}
i.idle{background:repeating-linear-gradient(135deg,var(--hatch) 0 2px,var(--soft) 2px 6px)}
i.unknown-wait{background:repeating-linear-gradient(135deg,#c9a227 0 2px,var(--soft) 2px 6px)}
"""

PATTERNS = """<svg width="0" height="0" class="patterns" aria-hidden="true"><defs>
<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" class="hatch-ground"/><line x1="0" y1="0" x2="0" y2="6" class="hatch-line"/></pattern>
<pattern id="unknown" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" class="hatch-ground"/><line x1="0" y1="0" x2="0" y2="6" stroke="#c9a227" stroke-width="3"/>
</pattern></defs></svg>"""
"""To be once in a page that has timelines."""

_CSS = """
:root{--ground:#f4f6f8;--card:#fff;--ink:#16202c;--muted:#5b6675;--line:#dfe4ea;--soft:#eef1f4;--hatch:#b9c1cc;
--accent:#2f6db5;--good:#1d7a4f;--bad:#b3261e;--warn:#fff4d6;--warn-ink:#6b4e00;--warn-line:#e8c766;--zoom:1}
@media (prefers-color-scheme:dark){:root{--ground:#10151c;--card:#19212b;--ink:#e6ebf1;--muted:#9aa7b6;--line:#2c3743;
--soft:#212b36;--hatch:#4d5a69;--accent:#7fb2ea;--good:#6fce9f;--bad:#ff8a80;--warn:#3a2f10;--warn-ink:#f5dc98;
--warn-line:#7d6520}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1280px;margin:0 auto;padding:28px 20px 60px}
.over{color:var(--accent);font-size:13px;font-weight:600;letter-spacing:.02em}
h1{font-size:26px;line-height:1.25;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 2px;letter-spacing:-.005em} h3{font-size:14px;margin:12px 0 6px;overflow-wrap:anywhere}
.lead{color:var(--muted);margin:4px 0 0;overflow-wrap:anywhere}
.warn{background:var(--warn);color:var(--warn-ink);border:1px solid var(--warn-line);border-radius:10px;
padding:10px 14px;margin:16px 0 0}
section,.tile{background:var(--card);border:1px solid var(--line);border-radius:12px}
section{padding:18px 20px 20px;margin-top:18px}
.about{color:var(--muted);margin:0 0 12px;font-size:14px;max-width:110ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px;margin-top:20px}
.tile{padding:12px 16px 13px} .tile .label{color:var(--muted);font-size:13px}
.tile .value{font-size:25px;font-weight:620;line-height:1.3;letter-spacing:-.015em;white-space:nowrap}
.tile .note{color:var(--muted);white-space:pre-line;font-size:12.5px;line-height:1.35}
.scroll{overflow-x:auto} table{border-collapse:collapse;width:100%;font-size:13.5px}
th{font-weight:600;color:var(--muted);font-size:12.5px;text-align:left;vertical-align:bottom}
th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);white-space:nowrap}
td:last-child,th:last-child{padding-right:0} tbody tr:last-child td{border-bottom:0}
.n{text-align:right} .good{color:var(--good)} .bad{color:var(--bad);font-weight:600}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:8px 36px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--muted);margin-top:10px}
.key{display:inline-block;width:13px;height:13px;border-radius:3px;margin-right:2px;vertical-align:-2px}
.key:last-of-type{margin-right:6px}
.bar{display:flex;height:20px;border-radius:4px;overflow:hidden;background:var(--soft)} .bar i{display:block}
.bars{display:grid;grid-template-columns:max-content 1fr max-content;gap:6px 14px;align-items:center;font-size:13.5px}
small{color:var(--muted);font-size:12px}
.about.below{margin:8px 0 0;font-size:13px} .about.below+.about.below{margin-top:0}
.bars .of{color:var(--muted);font-size:12.5px}
.meter{display:block;position:relative;width:130px;height:12px;background:var(--soft);border-radius:3px;overflow:hidden}
.meter i{position:absolute;left:0;top:0;bottom:0;border-radius:3px}
.meter .without{background:var(--hatch);opacity:.55} .meter .paper{background:#f0a13a} .meter .sent{background:#2f6db5}
.tools{display:flex;flex-wrap:wrap;gap:8px 22px;align-items:center;font-size:13.5px;color:var(--muted);margin:0 0 10px}
.tools label{display:flex;gap:7px;align-items:center} .tools input[type=range]{width:150px;accent-color:var(--accent)}
select{font:inherit;color:inherit;background:var(--soft);border:1px solid var(--line);border-radius:6px;padding:2px 6px}
.view{display:grid;grid-template-columns:max-content minmax(0,1fr)} .view[hidden]{display:none}
.row-labels{padding-right:12px} .row-label{height:34px;margin-bottom:8px;line-height:34px;font-size:13px}
.pan{overflow-x:auto;overflow-y:hidden}
svg.timeline{display:block;width:calc(100%*var(--zoom));font-size:11px}
svg.patterns{position:absolute} .hatch-ground{fill:var(--soft)} .hatch-line{stroke:var(--hatch);stroke-width:3}
.lane{fill:var(--soft);opacity:.45} .grid{stroke:var(--line)} .tick{fill:var(--muted)}
.pass{fill:var(--muted);opacity:.75}
.absent{fill:var(--muted);text-anchor:middle;font-style:italic;font-size:13px}
svg.timeline rect:not(.lane):not(.pass){stroke:var(--card);stroke-width:.7}
.number{text-anchor:middle;pointer-events:none} .small{display:none}
.message{display:none;stroke:var(--ink);stroke-width:1.2} svg.all .message,.message.lit{display:inline}
svg.all .message{opacity:.45} svg.all .message.lit{opacity:1}
svg.focus rect[data-m]:not(.lit){opacity:.22}
.key.sent{background:#2f6db5} .key.paper{background:#f0a13a} .key.without{background:var(--hatch)}
.facts{width:auto} .facts th{padding-right:24px;vertical-align:top} .facts td{white-space:normal;overflow-wrap:anywhere}
details summary{cursor:pointer;color:var(--accent)} details{margin-top:10px}
@media print{body{background:#fff;font-size:11pt} main{padding:0;max-width:none} .tools{display:none}
section{break-inside:avoid;border-color:#ccc} *{print-color-adjust:exact;-webkit-print-color-adjust:exact}
:root{--zoom:1!important}}
"""

_JS = """
"use strict";
const drawings = [...document.querySelectorAll("svg.timeline")];
const one = (selector, act) => { const found = document.querySelector(selector); if (found) act(found); };
function fitNumbers() {
  for (const drawing of drawings) {
    const wide = drawing.getBoundingClientRect().width;
    for (const number of drawing.querySelectorAll(".number"))
      number.classList.toggle("small", number.dataset.w / 100 * wide < 7 * number.textContent.length + 4);
  }
}
one("#zoom", (zoom) => zoom.addEventListener("input", () => {
  document.documentElement.style.setProperty("--zoom", Math.pow(2, zoom.value));
  fitNumbers();
}));
one("#step", (step) => step.addEventListener("change", () => {
  for (const view of document.querySelectorAll(".view")) view.hidden = view.dataset.step !== step.value;
  fitNumbers();
}));
one("#messages", (box) => box.addEventListener("change", () => {
  for (const drawing of drawings) drawing.classList.toggle("all", box.checked);
}));
const pans = [...document.querySelectorAll(".pan")];
for (const pan of pans) pan.addEventListener("scroll", () => {
  for (const other of pans) if (other.scrollLeft !== pan.scrollLeft) other.scrollLeft = pan.scrollLeft;
});
for (const drawing of drawings) {
  drawing.addEventListener("mouseover", (event) => {
    const of = event.target.dataset.m;
    drawing.classList.toggle("focus", of !== undefined);
    for (const shape of drawing.querySelectorAll("[data-m]")) shape.classList.toggle("lit", shape.dataset.m === of);
  });
  drawing.addEventListener("mouseleave", () => {
    drawing.classList.remove("focus");
    for (const shape of drawing.querySelectorAll(".lit")) shape.classList.remove("lit");
  });
}
addEventListener("resize", fitNumbers);
fitNumbers();
"""
