"""Part files to ``PREFIX.bin`` and ``.idx``, in unit order, in bounded memory."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import get_bin_path

from depthbench.data.indexed import PrefixInfo
from depthbench.data.outputs import Totals, new_temporary, publish
from depthbench.data.parts import part_path, read_unit_totals
from depthbench.data.prepare_worker import Job
from depthbench.errors import UserError

_COPY_BYTES = 8 << 20


def assemble(
    job: Job, prefixes: list[str], sources: list[dict[str, Any]], settings: str
) -> tuple[list[PrefixInfo], int]:
    """Join the parts of all units into one data set per split.

    Returns:
        what was written, and the number of documents skipped because they have no text.

    Raises:
        UserError: a split got no document, or the written files fail their checks.
    """
    dtype = np.dtype(job.dtype)
    units = range(len(job.units))
    totals = [done for unit in units if (done := _totals(job, unit)) is not None]
    if len(totals) != len(job.units):
        raise UserError(f"{job.parts} lost part files while they were in use: is another prepare writing there?")
    empty = sum(unit["empty"] for unit in totals)
    sums = [
        {key: sum(unit["splits"][split][key] for unit in totals) for key in ("documents", "tokens", "characters")}
        for split in job.splits
    ]
    documents = sum(s["documents"] for s in sums)
    if documents == 0:
        raise UserError(f"the inputs hold no text: all of their {empty} documents are empty")
    for split, of_split in zip(job.splits, sums, strict=True):
        if of_split["documents"] == 0:
            raise UserError(
                f"--valid-fraction {job.valid_fraction} of {documents} documents left {split.strip('_')} without any: "
                "choose another fraction or give more documents"
            )
    # All splits are written before the first is published, so a full disk leaves none of them half new.
    for split, prefix in zip(job.splits, prefixes, strict=True):
        with open(new_temporary(get_bin_path(prefix)), "wb") as target:
            for unit in units:
                with open(part_path(job.parts, unit, split, "tokens"), "rb") as part:
                    shutil.copyfileobj(part, target, _COPY_BYTES)
    infos = []
    for split, prefix, of_split in zip(job.splits, prefixes, sums, strict=True):
        lengths = np.concatenate([np.fromfile(part_path(job.parts, u, split, "lengths"), np.int32) for u in units])
        counts = np.zeros(job.tokenizer.vocab_size, dtype=np.int64)
        for unit in units:
            counts += np.fromfile(part_path(job.parts, unit, split, "counts"), np.int64)
        infos.append(
            publish(prefix, lengths, Totals(**of_split, counts=counts), dtype, job.tokenizer, sources, settings)
        )
    return infos, empty


def has_parts(folder: Path, settings: str) -> bool:
    """Return whether ``folder`` is from an interrupted run with these settings."""
    record = folder / "settings"
    return record.is_file() and record.read_text() == settings


def open_parts(job: Job, settings: str) -> set[int]:
    """Make the folder of parts ready for a run with these settings; return the units an earlier run finished.

    Raises:
        UserError: the folder exists and is not from ``prepare``.
    """
    if job.parts.is_dir() and any(job.parts.iterdir()) and not has_parts(job.parts, settings):
        if not (job.parts / "settings").is_file():
            raise UserError(f"{job.parts} is needed for part files but holds something else: choose another --output")
        print(f"{job.parts} is from other inputs or settings: discarded")
        shutil.rmtree(job.parts)
    job.parts.mkdir(parents=True, exist_ok=True)
    (job.parts / "settings").write_text(settings)
    for leftover in job.parts.glob("*.tmp"):
        leftover.unlink()
    return {unit for unit in range(len(job.units)) if _totals(job, unit) is not None}


def _totals(job: Job, unit: int) -> dict[str, Any] | None:
    return read_unit_totals(job.parts, unit, job.splits, np.dtype(job.dtype).itemsize, job.tokenizer.vocab_size)
