"""The folder that an export or import becomes: whole under its name, or not there."""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from depthbench.errors import UserError

EXPORTED = "Exported by depthbench"  # in the README.md of every export


def is_export(folder: Path) -> bool:
    """Whether this package wrote it, so that it may be replaced."""
    card = folder / "README.md"
    return card.is_file() and EXPORTED in card.read_text(errors="replace")


def check_out(out: Path, overwrite: bool, ours: Callable[[Path], bool] = is_export) -> None:
    """Raise UserError where `out` holds something that may not be replaced. ours: whether it may, if told to."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give the folder to write")
    held = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if not held:
        return
    if not overwrite:
        raise UserError(f"{out} is not empty ({len(held)} entries, {held[0]} first); give another, or --overwrite")
    if not ours(out):
        raise UserError(f"{out} is not empty and was not written by this command: --overwrite does not remove it")


@contextmanager
def new_folder(out: Path, what: str) -> Iterator[Path]:
    """A folder to write into, beside `out`, whose name it takes when the block ends; after an error it is removed.

    Raises UserError for an error of the file system.
    """
    out = out.resolve()  # a link stays one
    partial = out.parent / f".writing-{out.name}-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        yield partial
        _publish(partial, out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot write the {what} to {out}: {error}; nothing is left there") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _publish(partial: Path, out: Path) -> None:
    if not out.exists():
        os.rename(partial, out)
        return
    old = partial.with_name(f".replaced{partial.name}")
    os.rename(out, old)
    try:
        os.rename(partial, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
