"""What a rank of each stage holds while it reads, by kind: planned, and planned beside measured."""

from collections.abc import Sequence

from rich.table import Table

from depthbench.planning.prefill import PrefillMemory

from .measure import Measured

KINDS = {
    "weights": "weights",
    "kv_cache": "key-value cache",
    "depth_state": "depth state",
    "history_cache": "history cache",
    "workspace": "workspace",
    "peak": "peak",
}


def planned_table(stages: Sequence[PrefillMemory]) -> Table:
    """A rank of each stage, in GiB."""
    shown = _table("memory of a rank of each stage, GiB, planned")
    for plan in stages:
        shown.add_row(str(plan.stage), *(f"{getattr(plan, kind) / 2**30:,.3f}" for kind in KINDS))
    return shown


def table(found: Measured) -> Table:
    """The fullest rank of each stage, planned beside measured, in MiB."""
    shown = _table("memory of the fullest rank, MiB: planned / measured")
    for plan in found.planned:
        fullest = max((rank for rank in found.ranks if rank.stage == plan.stage), key=lambda rank: rank.peak)
        pairs = ((getattr(plan, kind), getattr(fullest, kind)) for kind in KINDS)
        shown.add_row(str(plan.stage), *(f"{ours / 2**20:,.2f} / {theirs / 2**20:,.2f}" for ours, theirs in pairs))
    return shown


def _table(title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("stage")
    for heading in KINDS.values():
        shown.add_column(heading, justify="right")
    return shown
