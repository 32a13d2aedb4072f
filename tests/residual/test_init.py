"""Initial weights: what they make architectures equal to, where they come from, and how they are distributed."""

import dataclasses
import math
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.config.schema import RunConfig
from depthbench.model.build import build_stage
from depthbench.model.init import generator_for
from depthbench.residual.depth_attention import depth_attention
from depthbench.residual.parameters import truncated_normal
from tests.harness import run_workers
from tests.models import Pieces, Weights, assemble, load_weights, pieces, small_run, start_stage

from .walk import SHIPPED, logits_from, shipped, start


# -- equal to Pre-LN --------------------------------------------------------------------------------------------------
def tiny_eps(architecture: str, settings: dict[str, Any], eps: float) -> RunConfig:
    """`architecture` with every eps that its config has set to `eps`."""
    plain = small_run(architecture, settings)
    names = [field.name for field in dataclasses.fields(plain.residual) if field.name.endswith("eps")]
    return small_run(architecture, {**settings, **dict.fromkeys(names, eps)})


def distance_from_pre_ln(
    rank: int, world_size: int, store: str, architecture: str, settings: dict[str, Any], eps: float
) -> float:
    """Largest difference of logits, over their largest, to a Pre-LN model that was given the same backbone weights."""
    run, pre_ln = tiny_eps(architecture, settings, eps), tiny_eps("pre_ln", {}, eps)
    stage = start_stage(rank, world_size, store, run)
    plain = build_stage(pre_ln, stage.context)
    load_weights(plain, assemble([pieces(stage, "data")]))
    tokens = torch.randint(0, run.model.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    ours, theirs = (logits_from(s, 0, start(s, tokens)) for s in (stage, plain))
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *[("block_attnres", {"sublayers_per_block": b}) for b in (1, 2, 3, 5, 8)],
        *[("hc", {"num_streams": n}) for n in (1, 2, 4)],
    ],
)
def test_equal_to_pre_ln(architecture: str, settings: dict[str, Any]) -> None:
    """At eps 1e-16, since AttnRes reads a mean: its eps weighs (number of sources)^2 more than Pre-LN's. The gap is
    eps's alone: it grows with it (conventions 16)."""
    distance = [run_workers(1, distance_from_pre_ln, architecture, settings, eps)[0] for eps in (1e-16, 1e-12, 1e-8)]
    assert distance[0] < 1e-9
    assert distance[1] < 1e-5
    if architecture != "hc" or settings["num_streams"] > 1:
        assert distance[2] > 10 * distance[1]


def test_a_single_source_leaves_its_read_without_gradient() -> None:
    """So the first read of every model would stay at its initial value: sublayer 0 has none."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(5, 2, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    query, gain = (torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "qg")
    mixed = depth_attention([source], query * gain, 1e-5)
    assert torch.equal(mixed, source)
    upstream = torch.randn(mixed.shape, generator=generator, dtype=torch.float64)
    mixed.backward(upstream)
    assert query.grad is not None and gain.grad is not None
    assert not query.grad.any() and not gain.grad.any()
    assert source.grad is not None and torch.equal(source.grad, upstream)


# -- the same everywhere, and nowhere twice ---------------------------------------------------------------------------
def initial(rank: int, world_size: int, store: str, run: RunConfig) -> Pieces:
    return pieces(start_stage(rank, world_size, store, run), "data")


def weights_of(name: str, world_size: int = 1, seed: int = 0, **parallel: Any) -> Weights:
    architecture, settings = shipped(name)
    run = small_run(architecture, settings, parallel={"distributed_optimizer": False, **parallel})
    run = dataclasses.replace(run, seed=seed)
    return assemble(run_workers(world_size, initial, run))


def is_constant(tensor: Tensor) -> bool:
    """Drawn from no distribution: few different values (ones, zeros, identities, one scale, routing biases)."""
    return tensor.unique().numel() <= 3


@pytest.mark.parametrize("name", SHIPPED)
def test_initial_weights(name: str) -> None:
    weights = weights_of(name)
    for layout in ({"tensor": 2}, {"tensor": 2, "sequence": True}):
        shared = weights_of(name, 2, **layout)
        assert set(shared) == set(weights)
        assert all(torch.equal(weights[key], shared[key]) for key in weights), layout
    drawn = {key: tensor for key, tensor in weights.items() if not is_constant(tensor)}
    linears = 4 * (4 + 3) + 2
    assert len(drawn) >= linears
    for (one, a), (other, b) in combinations(drawn.items(), 2):
        assert a.shape != b.shape or not torch.equal(a, b), f"{one} and {other} start equal"
    again = weights_of(name, seed=1)
    assert all(not torch.equal(drawn[key], again[key]) for key in drawn)
    assert all(torch.equal(weights[key], again[key]) for key in weights.keys() - drawn.keys())


def test_queries_start_at_zero() -> None:
    weights = weights_of("full_attnres")
    queries = [tensor for key, tensor in weights.items() if key.endswith("query")]
    gains = [tensor for key, tensor in weights.items() if "key_norm" in key]
    assert len(queries) == len(gains) == 8  # seven sublayers and the readout
    assert not any(bool(query.any()) for query in queries)
    assert all(bool((gain == 1).all()) for gain in gains)


# -- the distribution -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("std", [0.02, 1.5])
def test_truncated_normal(std: float) -> None:
    """Cut at three nominal deviations, which leaves 0.9866 of the deviation."""
    values = truncated_normal(std)((1500, 1000), generator_for(0, "some.weight")).double() / std
    count = values.numel()
    assert values.abs().max() <= 3
    assert values.abs().max() > 2.99
    assert abs(float(values.mean())) < 5 / math.sqrt(count)
    assert float(values.std()) == pytest.approx(0.98658, abs=4 / math.sqrt(2 * count))
    for bound in (0.5, 1.0, 2.0):  # its distribution function, scaled up by what was cut off
        expected = math.erf(bound / math.sqrt(2)) / math.erf(3 / math.sqrt(2))
        assert float((values.abs() < bound).double().mean()) == pytest.approx(expected, abs=2e-3)


def test_hyper_connections_halve_what_is_written() -> None:
    """Four streams: attention-out and MLP-down weights divided by two; nothing else differs from Pre-LN's."""
    ours, plain = weights_of("hc"), weights_of("pre_ln")
    for key, tensor in plain.items():
        halved = key.endswith((".attention.out.weight", ".mlp.down.weight"))
        assert torch.equal(ours[key] * 2 if halved else ours[key], tensor), key
    written = torch.cat([ours[key].flatten() for key in plain if key.endswith(".mlp.down.weight")])
    assert float(written.std()) == pytest.approx(0.98658 * 0.02 / 2, rel=0.02)
