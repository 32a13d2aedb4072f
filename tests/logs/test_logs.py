"""What a run leaves to read: console lines, JSONL and TensorBoard, also after a resume."""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from depthbench.config.schema import LogConfig
from depthbench.logs.console import ConsoleLog, duration, step_line
from depthbench.logs.metrics import MetricsLog

VALUES = {
    "loss": 3.14159,
    "grad_norm": 0.8712,
    "lr": 2.94e-4,
    "tokens_per_second": 412_309.6,
    "tokens_per_second_per_rank": 51_538.7,
    "memory_gib": 61.3,
    "skipped": 0,
    "eta_seconds": 11_520.0,
}
LINE = (
    "step  12/300 | loss 3.1416 | grad 0.871 | lr 2.94e-04 | 412,310 tok/s (51,539/rank) | mfu - | mem 61.30GiB | "
    "skipped 0 | eta 3h12m"
)


# -- console ----------------------------------------------------------------------------------------------------------
def test_a_step_line() -> None:
    assert step_line(12, 300, VALUES) == LINE
    assert step_line(12, 300, {**VALUES, "mfu": 0.4123}) == LINE.replace("mfu -", "mfu 41.2%")
    assert step_line(300, 300, {**VALUES, "eval/loss": 3.0}) == LINE.replace(" 12/", "300/")


@pytest.mark.parametrize(
    "odd",
    [
        {"loss": math.nan},
        {"loss": math.inf, "grad_norm": math.inf},
        {"grad_norm": math.nan, "mfu": math.nan},
        {"lr": 0.0},
        {"loss": 1e9, "grad_norm": 1e-12, "skipped": 100, "eta_seconds": 0.0},
    ],
    ids=str,
)
def test_columns_are_stable(odd: dict[str, float]) -> None:
    found = step_line(12, 300, {**VALUES, **odd}).split(" | ")
    assert "tok/s" in found.pop(4)
    assert [part.split()[0] for part in found] == [
        "step", "loss", "grad", "lr", "mfu", "mem", "skipped", "eta",
    ]  # fmt: skip
    for name, value in odd.items():
        if name in ("loss", "grad_norm") and not math.isfinite(value):
            assert f"{name.split('_')[0]} {value}" in found


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0m00s"), (59.6, "1m00s"), (61, "1m01s"), (3599, "59m59s"), (3600, "1h00m"), (1e6, "277h46m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_lines_reach_the_console_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    log = ConsoleLog(300, 0)
    log.line(LINE)
    log.line("[bold]no markup[/bold] " + "and no wrapping " * 20)
    log.advance(1)
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == LINE
    assert second.startswith("[bold]no markup[/bold]") and second.count("wrapping") == 20


# -- files ------------------------------------------------------------------------------------------------------------
def written(folder: Path, resumed_at: int, steps: Iterable[int], session: int, close: bool = True) -> MetricsLog:
    """What a session writes that starts at the checkpoint of step `resumed_at`; its loss tells which it was."""
    log = MetricsLog(LogConfig(), "run", folder, resumed_at, {})
    for step in steps:
        values: dict[str, float] = {"loss": session + step / 1000, "lr": 0.1}
        if step % 4 == 0:
            values["eval/loss"] = float(session)
        log.write(step, values)
    if close:
        log.close()
    return log


def json_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 3)) for event in events.Scalars(tag)]


SESSIONS = {
    "one": [(0, 10)],
    "stopped": [(0, 6), (6, 10)],
    "lost steps": [(0, 9), (5, 10)],
    "lost steps twice": [(0, 9), (5, 8), (7, 10)],
    "lost before anything was saved": [(0, 3), (0, 10)],
    "all lost, then more": [(0, 3), (0, 7), (4, 10)],
}


@pytest.mark.parametrize("sessions", SESSIONS.values(), ids=list(SESSIONS))
def test_each_step_once_and_in_order(sessions: list[tuple[int, int]], tmp_path: Path) -> None:
    """And it is the last session's that wrote it."""
    expected: dict[int, int] = {}
    for session, (start, end) in enumerate(sessions, 1):
        written(tmp_path, start, range(start + 1, end + 1), session)
        expected = {step: by for step, by in expected.items() if step <= start}
        expected |= dict.fromkeys(range(start + 1, end + 1), session)
    found = json_lines(tmp_path)
    assert [(line["step"], line["loss"]) for line in found] == [(s, by + s / 1000) for s, by in expected.items()]
    assert [line["step"] for line in found] == list(range(1, 11))
    assert scalars(tmp_path, "train/loss") == [(step, by + step / 1000) for step, by in expected.items()]
    assert scalars(tmp_path, "eval/loss") == [(step, float(expected[step])) for step in (4, 8)]
    assert [line["step"] for line in found if "eval/loss" in line] == [4, 8]


def test_a_start_on_a_node_whose_clock_is_behind_still_comes_last(tmp_path: Path) -> None:
    """Readers order event files by the second in their names."""
    written(tmp_path, 0, range(1, 5), 1)
    (ahead,) = (tmp_path / "tensorboard").iterdir()
    stamp = ahead.name.split(".")[3]
    ahead.rename(ahead.with_name(ahead.name.replace(stamp, str(int(time.time()) + 50), 1)))
    written(tmp_path, 3, range(4, 8), 2)
    written(tmp_path, 5, range(6, 10), 3)
    assert [step for step, _ in scalars(tmp_path, "train/loss")] == list(range(1, 10))


TORN = [b"", b"null", b"7", b"[]", b"{}", b'{"step": null}', b'{"message": ', b"\xff\0", b"\0\0\0", b'{"step": 4, "lo']


@pytest.mark.parametrize("tail", [*TORN, b'{"step": 4}', b'{"step": 3, "loss": 1.003'], ids=repr)
def test_a_last_line_that_a_crash_cut_short(tail: bytes, tmp_path: Path) -> None:
    written(tmp_path, 0, range(1, 4), 1)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(tail)
    written(tmp_path, 3, [4, 5], 2)
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("torn", TORN, ids=repr)
def test_a_line_that_is_none_between_others(torn: bytes, tmp_path: Path) -> None:
    """A lost node may leave anything; the steps after it are kept."""
    written(tmp_path, 0, range(1, 4), 1)
    file = tmp_path / "metrics.jsonl"
    first, rest = file.read_bytes().split(b"\n", 1)
    file.write_bytes(first + b"\n" + torn + b"\n" + rest)
    written(tmp_path, 3, [4, 5], 2)
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_last_line_that_lacks_nothing_but_its_end(tmp_path: Path) -> None:
    written(tmp_path, 0, range(1, 4), 1)
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    written(tmp_path, 3, [4, 5], 2)
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_run_that_is_killed_loses_nothing_before_its_checkpoint(tmp_path: Path) -> None:
    """JSON lines are in the file at once; TensorBoard's events from the next checkpoint on."""
    log = written(tmp_path, 0, [1, 2], 1, close=False)
    assert [line["step"] for line in json_lines(tmp_path)] == [1, 2]
    log.flush()
    assert scalars(tmp_path, "train/loss") == [(1, 1.001), (2, 1.002)]
    log.close()


def test_metrics_are_on_the_disk_before_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the checkpoint is: after a power loss it would else begin past lines that nobody writes again. So are those
    that a resumed run keeps."""
    synced: list[bytes] = []
    monkeypatch.setattr("os.fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").read_bytes()))
    log = written(tmp_path, 0, [1, 2], 1, close=False)
    log.flush()
    log.close()
    assert synced == [(tmp_path / "metrics.jsonl").read_bytes()]
    written(tmp_path, 1, [], 2)
    assert synced[1:] == [synced[0].splitlines(keepends=True)[0]]


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    log = MetricsLog(LogConfig(), "run", tmp_path, 0, {})
    log.write(1, {"loss": math.nan, "grad_norm": math.inf})
    log.close()
    (line,) = json_lines(tmp_path)
    assert math.isnan(line["loss"]) and line["grad_norm"] == math.inf
    assert "NaN" in (tmp_path / "metrics.jsonl").read_text()
    ((step, value),) = scalars(tmp_path, "train/loss")
    assert step == 1 and math.isnan(value)


def test_only_the_files_that_are_asked_for(tmp_path: Path) -> None:
    log = MetricsLog(LogConfig(tensorboard=False), "run", tmp_path, 0, {})
    log.write(1, VALUES)
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
