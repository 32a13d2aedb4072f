"""The console output in docs/plan.md is the plan's."""

import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS))
    page = (DOCS / "plan.md").read_text()
    updated = importlib.import_module("make_plan").updated(page)
    assert updated == page, "run python docs/make_plan.py"
