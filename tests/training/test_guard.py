"""Which updates the spike guard skips, and what it remembers."""

import math
from typing import Any

import pytest

from depthbench.config.schema import TrainConfig
from depthbench.training.guard import SpikeGuard, describe


def guard(factor: float = 3.0, window: int = 8, norms: tuple[float, ...] = ()) -> SpikeGuard:
    return SpikeGuard(TrainConfig(100, 4, 2, spike_factor=factor, spike_window=window), norms)


def decisions(of: SpikeGuard, norms: list[float]) -> list[bool]:
    return [of.skips(norm) for norm in norms]


@pytest.mark.parametrize(
    ("norms", "skipped"),
    [
        ([1.0, 1.0, 1.0, 9.0, 1.0], [3]),
        ([1.0, 1.0, 3.0, 3.0001], [3]),  # three times the median is no spike yet
        ([1.0, 9.0, 1.0], []),  # a quarter of the window, two norms, first
        ([1.0, 2.0, 4.6], [2]),  # more than 3 x 1.5
        ([1.0, 2.0, 4.4], []),
        ([1.0, 1.0, 9.0, 9.0, 9.0, 9.0], [2, 3]),  # what stays becomes usual: 9 < 3 x median(1, 1, 9, 9)
        ([0.0, 0.0, 1e-9], [2]),
    ],
    ids=str,
)
def test_skips(norms: list[float], skipped: list[int]) -> None:
    found = decisions(guard(), norms)
    assert [number for number, skip in enumerate(found) if skip] == skipped


def test_the_median_is_over_the_window() -> None:
    of = guard(window=4)
    assert not any(decisions(of, [1.0, 1.0, 1.0, 1.0, 2.9, 2.9, 2.9]))
    assert list(of.norms) == [1.0, 2.9, 2.9, 2.9]
    assert not of.skips(8.6)  # usual by now
    assert of.skips(8.8)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 128])
def test_it_waits_for_a_quarter_of_its_window(window: int) -> None:
    of = guard(window=window)
    first = math.ceil(window / 4)
    assert decisions(of, [1.0] * first + [50.0]) == [False] * first + [True]
    early = guard(window=window)
    assert not any(decisions(early, [*[1.0] * (first - 1), 50.0]))


def test_off_it_skips_nothing_but_remembers() -> None:
    of = guard(factor=0.0)
    assert not any(decisions(of, [1.0] * 8 + [1e9]))
    assert of.norms[-1] == 1e9


def test_it_goes_on_from_a_checkpoint() -> None:
    norms = [1.0, 1.1, 0.9, 7.0, 1.2, 1.3, 0.8, 1.0, 1.1, 3.5, 1.0, 9.0]
    whole = guard(window=5)
    expected = decisions(whole, norms)
    assert any(expected)
    for stop in range(len(norms)):
        before = guard(window=5)
        found = decisions(before, norms[:stop])
        after = guard(window=5, norms=tuple(before.norms))
        assert found + decisions(after, norms[stop:]) == expected
        assert after.norms == whole.norms


def test_a_shorter_window_keeps_the_newest() -> None:
    assert list(guard(window=2, norms=(1.0, 2.0, 3.0)).norms) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("position", "name"),
    [
        (0, "the embedding"),
        (1, "block 0 (attention, sublayer 0)"),
        (2, "block 0 (MLP, sublayer 1)"),
        (7, "block 3 (attention, sublayer 6)"),
        (8, "block 3 (MLP, sublayer 7)"),
        (9, "the readout or the head"),
    ],
)
def test_places_have_global_names(position: int, name: Any) -> None:
    assert describe(position, 4) == name
