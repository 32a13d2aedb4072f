"""Part files: the tokens of one work unit and split, as workers leave them for the final assembly.

A part is ``NNNNNN<split>.{tokens,lengths,counts}`` (ids in the output's dtype; int32 tokens per document; int64
occurrences per id) and a unit is done once its ``NNNNNN.json`` exists, which is written last.
"""

import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

KINDS = ("tokens", "lengths", "counts")


def part_path(folder: Path, unit: int, split: str, kind: str) -> Path:
    return folder / f"{unit:06d}{split}.{kind}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write ``content`` so that the file is either whole or absent."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


class PartWriter:
    """Collects the documents of one unit and split; files get their names only by ``commit``."""

    def __init__(self, folder: Path, unit: int, split: str, dtype: np.dtype[Any], vocab_size: int) -> None:
        self._paths = {kind: part_path(folder, unit, split, kind) for kind in KINDS}
        # The process id keeps a worker that outlived a killed prepare from writing into its successor's file.
        self._temporary = {kind: path.with_name(f"{path.name}.{os.getpid()}.tmp") for kind, path in self._paths.items()}
        self._tokens = open(self._temporary["tokens"], "wb")  # noqa: SIM115 - closed by __exit__
        self._lengths = open(self._temporary["lengths"], "wb")  # noqa: SIM115 - closed by __exit__
        self._dtype = dtype
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        self._documents = self._characters = 0

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()
        self._lengths.close()

    def add(self, documents: Sequence[list[int]], characters: int) -> None:
        """Append documents, each a list of ids that ends in its end-of-document id."""
        lengths = np.fromiter(map(len, documents), dtype=np.int32, count=len(documents))
        ids = np.fromiter(chain.from_iterable(documents), dtype=self._dtype, count=int(lengths.sum()))
        ids.tofile(self._tokens)
        lengths.tofile(self._lengths)
        self._counts += np.bincount(ids, minlength=len(self._counts))
        self._documents += len(documents)
        self._characters += characters

    def commit(self) -> dict[str, int]:
        """Give the files their names and return the part's totals."""
        self._tokens.close()
        self._lengths.close()
        self._counts.tofile(self._temporary["counts"])
        for kind in KINDS:
            os.replace(self._temporary[kind], self._paths[kind])
        return {"documents": self._documents, "tokens": int(self._counts.sum()), "characters": self._characters}


def finish_unit(folder: Path, unit: int, empty: int, splits: dict[str, dict[str, int]]) -> None:
    """Mark a unit as done. ``empty`` counts its documents without text, ``splits`` holds each part's totals."""
    write_json(folder / f"{unit:06d}.json", {"empty": empty, "splits": splits})


def read_unit_totals(
    folder: Path, unit: int, splits: Sequence[str], itemsize: int, vocab_size: int
) -> dict[str, Any] | None:
    """Return what ``finish_unit`` wrote, or None if the unit is not done or its files have other sizes than it says."""
    try:
        totals: dict[str, Any] = json.loads((folder / f"{unit:06d}.json").read_text())
        for split in splits:
            part = totals["splits"][split]
            sizes = (part["tokens"] * itemsize, part["documents"] * 4, vocab_size * 8)
            for kind, size in zip(KINDS, sizes, strict=True):
                if part_path(folder, unit, split, kind).stat().st_size != size:
                    return None
    except (OSError, ValueError, KeyError):  # a machine that lost power can leave any of the files short
        return None
    return totals
