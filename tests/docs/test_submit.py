"""The job script that docs/slurm.md shows is the one that is made."""

import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_example_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    script = importlib.import_module("make_submit").script()
    assert script == (DOCS / "examples" / "submit.sbatch").read_text(), "run python docs/make_submit.py"
