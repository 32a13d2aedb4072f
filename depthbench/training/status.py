"""`status.json` in a run folder: the word that a run leaves for launchers and people.

Imports nothing but the standard library and files that do not either: a job's script writes it too.
"""

import json
from pathlib import Path
from typing import Any

from depthbench.checkpoint.fence import Fence


def write_status(folder: Path, state: str, step: int, reason: str = "") -> None:
    """`status.json`, the marker that launchers read: running, stopped (resume me), finished or failed.

    Raises SupersededError if another attempt owns the run folder.
    """
    fence = Fence(folder)
    fence.check()
    content = {"state": state, "step": step, "reason": reason}
    if fence.attempt:
        content["attempt"] = fence.attempt
    partial = folder / "status.json.tmp"
    partial.write_text(json.dumps(content))
    partial.replace(folder / "status.json")


def read_status(folder: Path) -> dict[str, Any]:
    """Empty where there is none, or none that is whole."""
    try:
        content = json.loads((folder / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def settle_status(folder: Path, step: int, steps: int) -> None:
    """Of a run in which nothing is left to do, for a start that died between its last checkpoint and its last word.

    step: its newest checkpoint's. steps: how many the run is to have. Raises as `write_status`.
    """
    if read_status(folder).get("state") not in ("finished", "stopped"):
        if step >= steps:
            write_status(folder, "finished", step)
        else:
            write_status(folder, "stopped", step, f"train.stop_at={step}")
