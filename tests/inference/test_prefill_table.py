"""The table and the figure of `benchmarks/prefill/run.py`, with times and without."""

from pathlib import Path

import matplotlib.image
import pytest

from benchmarks.prefill.run import Row, draw, markdown

ROWS = [
    Row("400m_L16", "hc", 1.5e9, 2**20, 2**21, 3 * 2**20, 1234.0, 225.1),
    Row("400m_L32", "hc", 3.0e9, 2**21, 2**22, 6 * 2**20, 617.0, 450.2),
]


@pytest.mark.parametrize("times", [True, False])
def test_times_can_be_left_out(times: bool, tmp_path: Path) -> None:
    heading, line, first, second = markdown(ROWS, "Said.", times=times).splitlines()[2:]
    assert first == "| 400m_L16 | hc | 1.50 | 1.0 | 3.0 | 2.0 |" + (" 1,234 | 225.10 |" if times else "")
    assert heading.count("|") == line.count("|") == second.count("|") == (9 if times else 7)
    draw(ROWS, tmp_path / "figure.png", times=times)
    height, width = matplotlib.image.imread(tmp_path / "figure.png").shape[:2]
    assert width == (4 if times else 3) * height
