"""Draws follow the probabilities that temperature and top-p leave."""

import math
from typing import Any

import pytest
import torch

from depthbench.errors import UserError
from depthbench.inference.sampling import Sampler, Sampling

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 2.0, 0.0], [0.0, 3.0, 3.0, -2.0, 1.0]])


def naive(logits: list[float], temperature: float, top_p: float) -> list[float]:
    weights = [math.exp(x / temperature) for x in logits]
    weights = [w / sum(weights) for w in weights]
    kept, total = set(), 0.0
    for place in sorted(range(len(weights)), key=lambda i: -weights[i]):  # equal ones in their order
        if total >= top_p:
            break
        kept.add(place)
        total += weights[place]
    return [w / total if i in kept else 0.0 for i, w in enumerate(weights)]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.4, 0.8, 1.0])
def test_probabilities(temperature: float, top_p: float) -> None:
    found = Sampler(Sampling(temperature, top_p)).probabilities(LOGITS)
    for row, logits in zip(found, LOGITS, strict=True):
        assert row.tolist() == pytest.approx(naive(logits.tolist(), temperature, top_p), abs=1e-12)


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert Sampler(Sampling())(LOGITS).tolist() == [0, 1]


def test_ids_beyond_the_vocabulary_are_not_drawn() -> None:
    assert Sampler(Sampling(), vocab_size=2)(LOGITS).tolist() == [0, 1]
    assert Sampler(Sampling(), vocab_size=1)(LOGITS).tolist() == [0, 0]
    drawn = Sampler(Sampling(4.0), vocab_size=3)(LOGITS[:1].expand(1000, -1))
    assert set(drawn.tolist()) == {0, 1, 2}


def test_draws_follow_probabilities_and_repeat_with_their_seed() -> None:
    many = LOGITS[:1].expand(20_000, -1)
    drawn = Sampler(Sampling(1.5, 0.9, seed=3))(many)
    shares = [float((drawn == token).double().mean()) for token in range(5)]
    assert shares == pytest.approx(naive(LOGITS[0].tolist(), 1.5, 0.9), abs=0.015)
    assert torch.equal(drawn, Sampler(Sampling(1.5, 0.9, seed=3))(many))
    assert not torch.equal(drawn, Sampler(Sampling(1.5, 0.9, seed=4))(many))


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"must be"):
        Sampling(**wrong)
