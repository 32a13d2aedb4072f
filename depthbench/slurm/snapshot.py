"""A copy of the code that a job runs, so that it does not run tomorrow's edits when its turn comes."""

import json
import shutil
from pathlib import Path

import depthbench
from depthbench.training.provenance import SNAPSHOT, source


def take(folder: Path) -> None:
    """Copy the package, as it lies there with uncommitted changes, to `folder`/depthbench, and note its commit."""
    package = Path(depthbench.__file__).parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / SNAPSHOT).write_text(json.dumps(source()))
