"""What a run was: resolved settings, code and package versions, written into the run folder before the first step."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import yaml

import depthbench
from depthbench.config.load import plain
from depthbench.config.schema import RunConfig

PACKAGES = ("torch", "megatron-core", "numpy", "datasets", "sentencepiece", "tokenizers", "transformer-engine")
SNAPSHOT = "snapshot.json"  # beside a copy of the package: what `source` said where it was made


def _git(*words: str) -> str | None:
    here = Path(depthbench.__file__).parent
    try:
        found = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def source() -> dict[str, Any]:
    """Commit of the running code, and whether it was changed since; None where no repository tells."""
    copied = Path(depthbench.__file__).parents[1] / SNAPSHOT
    if copied.is_file():
        told: dict[str, Any] = json.loads(copied.read_text())
        return told
    ours = _git("ls-files", "--error-unmatch", "__init__.py") is not None  # an installed copy may lie in another's tree
    return {
        "commit": _git("rev-parse", "HEAD") if ours else None,
        "uncommitted_changes": bool(_git("status", "--porcelain")) if ours else None,
    }


def environment(world_size: int) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "depthbench": depthbench.__version__,
        **source(),
        "python": platform.python_version(),
        "packages": versions,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "world_size": world_size,
    }


def record(run: RunConfig, folder: Path, world_size: int, step: int) -> None:
    """Write `run.yaml` and `environment.json`; settings of an earlier start that differ are kept beside them."""
    text = yaml.safe_dump(plain(run), sort_keys=False)
    current = folder / "run.yaml"
    if current.is_file() and current.read_text() != text:
        current.rename(folder / f"run.until-step-{step}.yaml")
    current.write_text(text)
    (folder / "environment.json").write_text(json.dumps(environment(world_size), indent=1))
