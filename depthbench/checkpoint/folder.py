"""A run's checkpoint folder on disk: which checkpoints are complete, whole and worth keeping. No process group needed.

`step_00000120/` is a published checkpoint; it was `.saving-step_00000120-NONCE/` while it was written, and its
`manifest.json` was written last. So whatever has another name, or no manifest, is a remnant of a save that did not
finish.

Which checkpoints there are is also asked where torch is not installed or takes too long to import: in the script of a
Slurm job. So only what reads their tensors' metadata imports it.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthbench.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8})$")


@dataclass(frozen=True)
class Published:
    """One complete checkpoint."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads((self.path / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise self._broken(f"{MANIFEST} cannot be read ({error})") from error
        return content

    @cached_property
    def metadata(self) -> Metadata:
        """Torch's, of all tensors. Raises UserError where it cannot be read."""
        from torch.distributed.checkpoint import FileSystemReader

        try:
            return FileSystemReader(self.path).read_metadata()
        except Exception as error:  # a pickle that is cut short fails in many ways
            raise self._broken(f".metadata cannot be read ({error})") from error

    def _broken(self, what: str) -> UserError:
        return UserError(
            f"checkpoint {self.path}: {what}. Restore it, or move this folder away to resume from an older checkpoint"
        )

    def stored_tensors(self) -> dict[str, TensorStorageMetadata]:
        """What the checkpoint says of every stored tensor, by key."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        stored = self.metadata.state_dict_metadata
        return {key: m for key, m in stored.items() if isinstance(m, TensorStorageMetadata)}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every stored tensor, by key."""
        return {key: tuple(m.size) for key, m in self.stored_tensors().items()}

    def check_files(self) -> None:
        """Raise UserError naming the first data file that is missing or shorter than the metadata says."""
        from .stored import damage

        if fault := damage(self.path, self.metadata):
            raise self._broken(fault)


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def find(path: Path) -> Published:
    """The checkpoint at `path`: one's own folder, or the newest of a run's or of its `checkpoints` folder.

    Raises UserError where there is none that is complete.
    """
    match = _NAME.fullmatch(path.resolve().name)
    if match and (path / MANIFEST).is_file():
        return Published(path, int(match[1]))
    newest = latest(path / "checkpoints") or latest(path)
    if newest is None:
        raise UserError(f"{path} is no complete checkpoint (step_NNNNNNNN with a {MANIFEST}) and holds none")
    return newest


def published(root: Path) -> list[Published]:
    """Complete checkpoints under `root`, oldest first."""
    found = []
    for path in root.glob("step_*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(Published(path, int(match[1])))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest(root: Path) -> Published | None:
    complete = published(root)
    return complete[-1] if complete else None


def remove_remnants(root: Path) -> None:
    """Delete what interrupted saves and deletions left behind. A killed run's writer may still be at work in one.

    Renamed first, in one step: a survivor of an earlier start that is about to publish its save then finds nothing to
    rename, and does not publish half of it.
    """
    for path in root.glob(".saving-*"):
        with suppress(OSError):
            path.rename(root / f".retired-{path.name}")
    for path in root.glob(".retired-*"):
        shutil.rmtree(path, ignore_errors=True)


def publish(writing: Path, path: Path, check_owner: Callable[[], None]) -> None:
    """Give a complete save its name as a checkpoint.

    A folder of that name that is no checkpoint (it has no manifest) makes way. One that is stays: it is the same step
    of the same run, published by a survivor of an earlier attempt. check_owner: asked before either, since it may as
    well be the next attempt's; raises what it raises.
    """
    try:
        writing.rename(path)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    check_owner()
    if (path / MANIFEST).is_file():
        shutil.rmtree(writing, ignore_errors=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
        writing.rename(path)


def retire(root: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (0: keep all)."""
    for checkpoint in published(root)[:-keep] if keep else []:
        retired = root / f".retired-{checkpoint.path.name}"  # renamed first: half a checkpoint must not look complete
        checkpoint.path.rename(retired)
        shutil.rmtree(retired, ignore_errors=True)
