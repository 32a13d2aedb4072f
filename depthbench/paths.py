"""Where the files that ship with the package lie: beside it in a checkout, inside it in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(folder: str) -> Path:
    inside = _PACKAGE / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


CONFIGS = _shipped("configs")
LAUNCH = _shipped("launch")
