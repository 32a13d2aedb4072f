"""What a checkpoint holds, read from its manifest and metadata: no tensor is loaded, no process group started."""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from depthbench.errors import UserError

from .folder import find

GROUPS = ("model", "optimizer")


@dataclass(frozen=True)
class StoredTensor:
    """One logical tensor, whole: the layout that saved it does not show."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Contents:
    """groups: `model`, `optimizer`, `other`, each sorted by name. fault: what is wrong with the files, if anything."""

    path: Path
    step: int
    run: str
    architecture: str
    precision: str
    groups: dict[str, list[StoredTensor]]
    fault: str

    def totals(self, group: str) -> dict[str, int]:
        tensors = self.groups[group]
        return {
            "tensors": len(tensors),
            "elements": sum(tensor.elements for tensor in tensors),
            "bytes": sum(tensor.bytes for tensor in tensors),
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""

        def plain(tensor: StoredTensor) -> dict[str, Any]:
            return {"name": tensor.name, "shape": list(tensor.shape), "dtype": _dtype(tensor)}

        return {
            "path": str(self.path),
            "run": self.run,
            "step": self.step,
            "architecture": self.architecture,
            "precision": self.precision,
            "complete": not self.fault,
            "fault": self.fault or None,
            "totals": {group: self.totals(group) for group in self.groups},
            "tensors": {group: [plain(tensor) for tensor in tensors] for group, tensors in self.groups.items()},
        }


def _dtype(tensor: StoredTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def inspect(path: Path) -> Contents:
    """Look at a checkpoint, or at the newest one of a run folder.

    Raises UserError where there is no complete checkpoint, or its manifest or metadata cannot be read.
    """
    checkpoint = find(path)
    manifest = checkpoint.manifest()
    groups: dict[str, list[StoredTensor]] = {group: [] for group in (*GROUPS, "other")}
    for key, stored in sorted(checkpoint.stored_tensors().items()):
        group = key.partition(".")[0]
        tensor = StoredTensor(key, tuple(stored.size), stored.properties.dtype)
        groups[group if group in GROUPS else "other"].append(tensor)
    try:
        checkpoint.check_files()
        fault = ""
    except UserError as error:
        fault = str(error)
    return Contents(
        path=checkpoint.path,
        step=checkpoint.step,
        run=manifest.get("settings", {}).get("name", "unknown"),
        architecture=manifest.get("architecture", "unknown"),
        precision=manifest.get("precision", "unknown"),
        groups=groups,
        fault=fault,
    )


def render(contents: Contents) -> Table:
    """A table for the console: every tensor, then totals."""
    title = f"{contents.run}: {contents.architecture}, step {contents.step:,}, {contents.precision}"
    table = Table(title=title, caption=contents.fault or "all files are present", title_justify="left")
    table.add_column("tensor", overflow="fold")
    for name in ("shape", "dtype", "elements"):
        table.add_column(name, justify="right")
    for tensors in contents.groups.values():
        for tensor in tensors:
            shape = " x ".join(map(str, tensor.shape))
            table.add_row(tensor.name, shape, _dtype(tensor), f"{tensor.elements:,}", end_section=tensor is tensors[-1])
    for group in contents.groups:
        total = contents.totals(group)
        size = f"{total['bytes'] / 2**20:,.1f} MiB"
        table.add_row(f"{group}, {total['tensors']} tensors", size, "", f"{total['elements']:,}")
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="FOLDER", help="a checkpoint, or a run folder (its newest one)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print what a checkpoint holds. Returns 0 if all its files are there, else 1; UserError as `inspect`."""
    contents = inspect(args.path)
    if args.json:
        print(json.dumps(contents.as_dict(), indent=1))
    else:
        Console().print(render(contents))
    return 1 if contents.fault else 0
