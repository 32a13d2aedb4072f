"""The sections of a report, but for the timelines."""

from collections.abc import Iterable
from html import escape

from .events import Recording
from .page import Cell, bar, legend, section, table, text, tile
from .parts import Part
from .planned import planned
from .summary import EdgeSummary, Summary
from .units import duration, rate, share, size

_SLOWEST = 5
_VISIBLE = 5e-4
"""Of a pass: smaller shares are not listed."""


def headlines(summary: Summary) -> str:
    """The numbers at the top."""
    planned_step = f"\nplanned {duration(summary.planned_step)}" if summary.planned_step is not None else ""
    planned_bubble = f"planned {share(summary.planned_bubble)}" if summary.planned_bubble is not None else "not planned"
    saved = "a step"
    if summary.sent_without_cache:
        saved = f"a step\n{share(1 - summary.sent_bytes / summary.sent_without_cache)} less than without cache"
    tiles = [
        tile("step", duration(summary.step), f"median of {len(summary.steps)}{planned_step}"),
        tile("tokens a second", f"{summary.tokens_per_second:,.0f}", "all ranks"),
        tile("bubble", share(summary.bubble), planned_bubble),
        tile("exposed transfer", share(summary.exposed), "of the pass,\npart of the bubble"),
        tile("sent between stages", size(summary.sent_bytes), saved),
        tile("peak memory", size(summary.memory_bytes), "of the fullest rank"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def passes(summary: Summary) -> str:
    """The bubble, measured and planned."""
    rows = [("measured", summary.passing, summary.bubble)]
    if summary.planned_bubble is not None:
        busy = {part: value for part, value in summary.passing.items() if part.is_busy}
        scale = (1 - summary.planned_bubble) / (sum(busy.values()) or 1.0)
        as_planned = {part: value * scale for part, value in busy.items()} | {Part.IDLE: summary.planned_bubble}
        rows.append(("planned", as_planned, summary.planned_bubble))
    about = (
        "The ranks' time from the first forward's begin to the last backward's end, all steps and ranks together. "
        "What of it is neither forward nor backward is the bubble; a plan's bubble is that of the same stretch."
    )
    return section("Where the pass went", about, pass_bars(rows))


def pass_bars(rows: list[tuple[str, dict[Part, float], float]]) -> str:
    """(name, shares of the pass, its bubble) a bar; under them the shares in numbers and a legend."""
    bars, splits, shown = [], [], set()
    for name, passing, bubble in rows:
        shares = [(part, passing[part]) for part in Part if passing.get(part, 0) >= _VISIBLE]
        bars.append(_bar_row(name, shares, f"bubble {share(bubble)}"))
        splits.append(f"<b>{escape(name)}</b> " + " · ".join(f"{part.value} {share(value)}" for part, value in shares))
        shown |= {part for part, _ in shares}
    numbers = "".join(f'<p class="about below">{split}</p>' for split in splits)
    return f'<div class="bars">{"".join(bars)}</div>{numbers}{legend(part for part in Part if part in shown)}'


def rank_bars(summary: Summary) -> str:
    """A bar for each rank's mean step."""
    longest = max(sum(rank.parts.values()) for rank in summary.ranks) or 1.0
    shown = [part for part in Part if any(rank.parts[part] > 0 for rank in summary.ranks)]
    rows = [
        _bar_row(
            rank.name,
            [(part, rank.parts[part] / longest) for part in shown],
            f"{duration(rank.busy)} busy of {duration(sum(rank.parts.values()))}",
            [f"{part.value}: {duration(rank.parts[part])}" for part in shown],
        )
        for rank in summary.ranks
    ]
    content = f'<div class="bars">{"".join(rows)}</div>{legend(shown)}'
    return section("Where each rank's step went", "A mean step, all of its time.", content)


def _bar_row(name: str, shares: list[tuple[Part, float]], said: str, tips: list[str] | None = None) -> str:
    tips = tips or [f"{part.value}: {share(value)}" for part, value in shares]
    stacked = bar((part, value, tip) for (part, value), tip in zip(shares, tips, strict=True))
    return f'<div>{escape(name)}</div>{stacked}<div class="of n">{escape(said)}</div>'


def edges(summary: Summary) -> str:
    """What every edge carried, beside what was planned and what other schemes would."""
    widest = max(max(edge.bytes, edge.bytes_without_cache or 0, edge.bytes_paper or 0) for edge in summary.edges) or 1
    head = ["chunks", "direction", "messages", "measured", "planned", "paper's scheme", "without cache", ""]
    head += ["transfer, worst", "rate, at least", "exposed", "idle"]
    checked = [edge.as_planned for edge in summary.edges if edge.as_planned is not None]
    verdict = ""
    if checked:
        matching = f"{sum(checked)} of {len(checked)}" if not all(checked) else f"all {len(checked)}"
        verdict = f" Measured bytes are the planned ones on {matching} edges."
    about = (
        "Bytes are a microbatch's, of one tensor-parallel rank. Transfer: from both ends posted to seen received, "
        "median and worst, so a receiver that computes meanwhile makes it longer; the rate is at the median. Exposed "
        "and idle: how long the receiver waited for a message, after and before it was sent, mean." + verdict
    )
    key = (
        '<div class="legend"><span><i class="key sent"></i>measured</span><span><i class="key paper"></i>more by the '
        'AttnRes paper\'s scheme</span><span><i class="key without"></i>more without a cache</span></div>'
    )
    return section("Edges", about, table(head, [_edge_row(edge, widest) for edge in summary.edges]) + key)


def _edge_row(edge: EdgeSummary, widest: int) -> list[Cell]:
    sizes = (edge.planned_bytes, edge.bytes_paper, edge.bytes_without_cache)
    return [
        Cell(f"{edge.name} <small>stage {edge.sender_stage} → {edge.receiver_stage}</small>", number=False),
        text(edge.direction),
        Cell(f"{edge.messages:,}"),
        Cell(size(edge.bytes) if edge.messages else "-", good=edge.as_planned),
        *(Cell(size(planned_size)) for planned_size in sizes),
        Cell(_meter(edge, widest), number=False),
        Cell(duration(edge.transfer) + (f" <small>{duration(edge.worst)}</small>" if edge.worst else "")),
        Cell(rate(edge.gigabytes_per_second)),
        Cell(duration(edge.exposed)),
        Cell(duration(edge.idle)),
    ]


def _meter(edge: EdgeSummary, widest: int) -> str:
    """The longest lies at the bottom."""
    layers = (("without", edge.bytes_without_cache), ("paper", edge.bytes_paper), ("sent", edge.bytes))
    drawn = (f'<i class="{name}" style="width:{100 * (number or 0) / widest:.2f}%"></i>' for name, number in layers)
    return f'<span class="meter">{"".join(drawn)}</span>'


def slowest(summary: Summary) -> str:
    """What to look at first."""
    by_rank = [
        [text(rank.name), Cell(duration(rank.busy)), Cell(duration(rank.parts[Part.IDLE])), text(rank.host)]
        for rank in summary.slowest_ranks[:_SLOWEST]
    ]
    by_edge = [
        [
            text(edge.name),
            text(edge.direction),
            Cell(duration(edge.transfer)),
            Cell(rate(edge.gigabytes_per_second)),
            Cell(duration(edge.exposed)),
        ]
        for edge in summary.slowest_edges[:_SLOWEST]
    ]
    halves = (
        ("Ranks that compute longest", table(["rank", "busy a step", "idle a step", "host"], by_rank)),
        ("Edges that transfer longest", table(["chunks", "direction", "transfer", "rate", "exposed"], by_edge)),
    )
    content = "".join(f"<div><h3>{name}</h3>{found}</div>" for name, found in halves)
    return section("Slowest", "", f'<div class="two">{content}</div>')


def memory(summary: Summary) -> str:
    """Peaks of every rank, and what its cache saved it from receiving."""
    head = ["rank", "host", "device", "memory, peak", "planned", "cache, peak", "planned", "taken from it"]
    rows = [
        [
            text(rank.name),
            text(rank.host),
            text(rank.device),
            Cell(size(rank.memory_bytes)),
            Cell(size(rank.planned_memory)),
            Cell(size(rank.cache_bytes)),
            Cell(size(rank.planned_cache_bytes)),
            Cell(size(rank.cache_hit_bytes)),
        ]
        for rank in summary.ranks
    ]
    about = (
        "The history cache refers to tensors that the pass holds anyway; what a step takes from it was not "
        "sent again. Planned memory is what tensors ask for."
    )
    return section("Memory and history cache", about, table(head, rows))


def provenance(recording: Recording, summary: Summary) -> str:
    """Of what, where and how exactly it was recorded."""
    plan = planned(recording)
    facts: Iterable[tuple[str, str]] = (
        ("run", summary.run or "-"),
        ("architecture", summary.architecture or "-"),
        ("parameters", f"{plan.parameters:,}" if plan.parameters is not None else "-"),
        *((name, value) for name, value in plan.settings if name.startswith("parallel.")),
        ("ranks", f"{summary.world_size}, of which {len(summary.ranks)} with finished steps"),
        ("steps", ", ".join(str(step.step) for step in summary.steps)),
        ("clocks of the ranks agree within", duration(summary.clock_error)),
        ("folder", str(recording.folder)),
    )
    content = _facts(facts)
    if plan.settings:
        content += f"<details><summary>all settings</summary>{_facts(plan.settings)}</details>"
    return section("Provenance", "", content)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'
