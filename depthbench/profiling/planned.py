"""What a recording's plan.json says, where there is one: each of its outermost keys may be missing."""

from dataclasses import dataclass, field
from typing import Any

from .events import Recording

EdgeKey = tuple[int, bool]
"""(the later chunk of the two, backward), as spans name a message."""


@dataclass(frozen=True)
class Planned:
    """run, architecture: names, "" where unknown. stages: 0 where unknown. bubble: idle share of the forward-backward
    phase. memory, cache_bytes: peaks of a rank of each stage. settings: (dotted key, value) of the run."""

    run: str = ""
    architecture: str = ""
    stages: int = 0
    bubble: float | None = None
    step_seconds: float | None = None
    edges: dict[EdgeKey, dict[str, Any]] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    cache_bytes: list[int] = field(default_factory=list)
    parameters: int | None = None
    settings: list[tuple[str, str]] = field(default_factory=list)


def planned(recording: Recording) -> Planned:
    """Nothing known where the recording has no plan."""
    plan = recording.plan
    if plan is None:
        return Planned()
    run = plan.get("run", "")
    settings = run if isinstance(run, dict) else {}
    edges = {(max(edge["from"], edge["to"]), edge["direction"] == "backward"): edge for edge in plan.get("edges", [])}
    return Planned(
        run=str(settings.get("name", "") if settings else run),
        architecture=str(plan.get("architecture", "")),
        stages=1 + max((edge["sender_stage"] for edge in edges.values()), default=-1),
        bubble=plan.get("bubble"),
        step_seconds=plan.get("step_seconds"),
        edges=edges,
        memory=[stage["peak"] for stage in plan.get("memory", {}).get("stages", [])],
        cache_bytes=plan.get("cache_bytes", []),
        parameters=plan.get("parameters", {}).get("total"),
        settings=list(_flat(settings)),
    )


def _flat(settings: dict[str, Any], above: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        rows += _flat(value, f"{above}{name}.") if isinstance(value, dict) else [(f"{above}{name}", str(value))]
    return rows


def num_stages(recording: Recording) -> int:
    """Stages of the pipeline: as planned, or as far as the ranks that are there show."""
    return max(planned(recording).stages, *(record.pipeline + 1 for record in recording.ranks))
