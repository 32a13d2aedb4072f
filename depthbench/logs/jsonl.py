"""The end of a file with one JSON object a line.

Imports nothing but the standard library: a Slurm job's script asks it too.
"""

import json
import os
from pathlib import Path
from typing import Any

_TAIL = 1 << 20  # bytes at a file's end in which its last lines are looked for: thousands of steps


def last_lines(path: Path) -> list[dict[str, Any]]:
    """The last whole lines, however long the file is; those that a crash has torn are left out."""
    try:
        with open(path, "rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _TAIL)
            file.seek(start)
            pieces = file.read().split(b"\n")[1 if start else 0 : -1]  # the last has no end yet, or is empty
    except OSError:
        return []
    return [line for line in map(_parsed, pieces) if line]


def _parsed(piece: bytes) -> dict[str, Any]:
    try:
        content = json.loads(piece)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
