"""The benchmarks of reading and the GPU's script, from start to end at tiny sizes."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.prefill import chunks, long
from benchmarks.prefill.run import Row, measured
from depthbench.planning.prefill import Reading
from tests.gpu import prefill
from tests.gpu.prefill import BASE, BLOCK, TINY, Part, Report, perform
from tests.harness import defer_world, run_workers


def one_row(rank: int, world_size: int, store: str) -> Row:
    defer_world(rank, world_size, store)
    return measured("400m_L16", "hc", TINY, Reading(32, 16, 2))


def test_a_row_of_the_table() -> None:
    """Sixteen layers of width 64: two heads of 32, two sequences of 32 tokens, float32."""
    (row,) = run_workers(1, one_row)
    assert (row.shape, row.architecture) == ("400m_L16", "hc")
    assert row.kv_cache == 16 * 2 * 32 * 64 * 4, "of one sequence"
    assert row.peak == pytest.approx(row.planned, rel=0.05)
    assert row.hours * row.tokens_per_second == pytest.approx(1e9 / 3600)


def smaller_chunks(rank: int, world_size: int, store: str, out: Path) -> None:
    defer_world(rank, world_size, store)
    sys.argv = ["chunks.py", str(out), *TINY, "--tokens", "32", "--chunks", "32", "8"]
    chunks.main()


def test_smaller_chunks(tmp_path: Path) -> None:
    run_workers(1, smaller_chunks, tmp_path / "chunks.json")
    whole, quarter = json.loads((tmp_path / "chunks.json").read_text())["rows"]
    assert (whole["chunk"], quarter["chunk"]) == (32, 8)
    assert whole["speed"] == 1 and quarter["quartiles"][0] <= quarter["speed"] <= quarter["quartiles"][1]
    assert whole["planned_depth_state"] == 4 * quarter["planned_depth_state"] and whole["peak"] > quarter["peak"]


def read(rank: int, world_size: int, store: str, reading: Reading, out: Path) -> None:
    defer_world(rank, world_size, store)
    long.read(world_size, reading, out)


def test_a_long_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(ranks: int, args: argparse.Namespace, folder: Path) -> Any:
        run_workers(ranks, read, Reading(args.tokens, args.chunk), folder / "found.pt")
        return torch.load(folder / "found.pt", weights_only=True)

    monkeypatch.setattr(long, "launched", launched)
    out = tmp_path / "new" / "long.json"
    monkeypatch.setattr(sys, "argv", ["long.py", "--tokens", "96", "--chunk", "32", "--output", str(out)])
    long.main()
    found = json.loads(out.read_text())
    assert found["positions_compared"] == 3 and found["likeliest_tokens_equal"]
    assert found["largest_difference_over_largest_logit"] < 1e-5
    for ranks, one in found["ranks"].items():
        for kind in ("kv_cache", "depth_state"):
            assert one["measured"][kind] == one["planned"][kind] > 0, (ranks, kind)


def performed(rank: int, world_size: int, store: str, parts: list[Part], limits: list[float], out: Path) -> list[int]:
    """The script's exit status with each limit in seconds; what it wrote is in folders by their number."""
    defer_world(rank, world_size, store)
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(prefill, "parts", lambda divisor: parts)
        for number, seconds in enumerate(limits):
            monkeypatch.setattr(prefill, "SECONDS", seconds)
            found.append(perform(out / str(number), rehearsal=True))
    return found


def test_the_gpu_script(tmp_path: Path) -> None:
    """A part that fails, and those that there is no time for, are in the report."""
    wrong = Part("depthbench_400m", "400m_L17", BASE, Reading(32, 32, 8))
    parts = [Part("depthbench_400m", "400m_L16", name, Reading(32, 32, 8)) for name in (BASE, BLOCK)]
    assert run_workers(1, performed, [parts[0], wrong, parts[1]], [1e9, 0.0], tmp_path) == [[1, 1]]
    found = [json.loads((tmp_path / f"{number}/CPU-rehearsal-prefill.json").read_text()) for number in (0, 1)]
    assert [[row["architecture"] for _, row in each["rows"]] for each in found] == [[BASE, BLOCK], [BASE]]
    (error,) = found[0]["errors"]
    assert error.startswith(f"{wrong}: UserError(") and "400m_L17" in error
    assert found[1]["errors"] == [f"{wrong}: no time left", f"{parts[1]}: no time left"]
    text = (tmp_path / "1/CPU-rehearsal-prefill.md").read_text()
    assert text.count("- failed: ") == 2 and "time against Pre-LN" not in text
    assert "400m_L16: Block AttnRes takes " in (tmp_path / "0/CPU-rehearsal-prefill.md").read_text()


def test_overheads() -> None:
    """1000 tokens a second against 800 are a quarter more time; a shape without both has none."""

    def row(shape: str, architecture: str, speed: float) -> tuple[Part, Row]:
        part = Part("depthbench_400m", shape, architecture, Reading(32, 32, 8))
        return part, Row(shape, architecture, 1.0, 1, 1, 1, speed, 1.0)

    both = [row("400m_L16", BASE, 1000.0), row("400m_L16", BLOCK, 800.0)]
    report = Report("a device", "2", rows=[*both, row("400m_L16", "hc", 500.0), row("400m_L32", BLOCK, 700.0)])
    assert report.overheads() == ["- 400m_L16: Block AttnRes takes +25.0% time against Pre-LN"]
