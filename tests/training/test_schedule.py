"""The learning rate at each update."""

import math
from itertools import pairwise

import pytest

from depthbench.config.schema import OptimizerConfig
from depthbench.training.schedule import learning_rate


def rates(steps: int, **changes: float) -> list[float]:
    config = OptimizerConfig(**{"lr": 2e-3, "min_lr_ratio": 0.1, "warmup_fraction": 0.1, **changes})
    return [learning_rate(update, steps, config) for update in range(1, steps + 1)]


def test_linear_warmup_then_half_a_cosine() -> None:
    found = rates(100)
    assert found[:10] == pytest.approx([2e-4 * update for update in range(1, 11)], rel=1e-12)
    for update in range(10, 101):
        expected = 2e-4 + 1.8e-3 * (1 + math.cos(math.pi * (update - 10) / 90)) / 2
        assert found[update - 1] == pytest.approx(expected, rel=1e-12)
    assert max(found) == found[9] == 2e-3
    assert found[54] == pytest.approx(1.1e-3, rel=1e-12)  # half way down
    assert found[-1] == pytest.approx(2e-4, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 10, 99, 1000])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("min_lr_ratio", [0.0, 0.1, 1.0])
def test_its_ends_at_any_length(steps: int, warmup_fraction: float, min_lr_ratio: float) -> None:
    found = rates(steps, warmup_fraction=warmup_fraction, min_lr_ratio=min_lr_ratio)
    warmup = round(steps * warmup_fraction)
    assert all(0 <= rate <= 2e-3 for rate in found)
    assert all(a < b for a, b in pairwise(found[:warmup]))
    assert all(a >= b for a, b in pairwise(found[max(warmup - 1, 0) :]))
    if warmup:
        assert found[warmup - 1] == 2e-3
    if warmup < steps:
        assert found[-1] == pytest.approx(2e-3 * min_lr_ratio, abs=1e-18)
        assert min(found[warmup:]) >= 2e-3 * min_lr_ratio
