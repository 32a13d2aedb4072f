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
from depthbench.residual import mhc
from depthbench.residual.depth_attention import depth_attention
from depthbench.residual.parameters import truncated_normal
from tests.harness import run_workers
from tests.models import Pieces, Weights, assemble, load_weights, pieces, reference_shape, small_run, start_stage
from tests.reference import random_weights

from .walk import SHIPPED, logits_from, run_sublayer, shipped, start

# -- equal to Pre-LN --------------------------------------------------------------------------------------------------
EPS = (1e-12, 1e-10)


def with_eps(architecture: str, settings: dict[str, Any], eps: float, model: dict[str, Any]) -> RunConfig:
    """`architecture` with every eps that its config has set to `eps`."""
    plain = small_run(architecture, settings)
    names = [field.name for field in dataclasses.fields(plain.residual) if field.name.endswith("eps")]
    return small_run(architecture, {**settings, **dict.fromkeys(names, eps)}, model=model)


def distance_from_pre_ln(
    rank: int, world_size: int, store: str, architecture: str, settings: dict[str, Any], model: dict[str, Any]
) -> list[float]:
    """Largest difference of logits, over their largest, to a Pre-LN model whose weights are copied, for each of EPS."""
    context = start_stage(rank, world_size, store, small_run("pre_ln")).context
    distances = []
    for eps in EPS:
        stage, pre_ln = (
            build_stage(with_eps(name, own, eps, model), context)
            for name, own in ((architecture, settings), ("pre_ln", {}))
        )
        load_weights(stage, assemble([pieces(stage, "data")]) | assemble([pieces(pre_ln, "data")]))
        tokens = torch.randint(0, 150, (2, 16), generator=torch.Generator().manual_seed(0))
        ours, theirs = (logits_from(s, 0, start(s, tokens)) for s in (stage, pre_ln))
        distances.append(float((ours - theirs).detach().abs().max() / theirs.abs().max().detach()))
    return distances


# Zero queries read the mean of N sources where Pre-LN reads their sum h, so in the norm that follows eps weighs N^2
# times more (n streams' sum in HC's readout: n^2 times less), which leaves a gap of about N^2 eps / mean(h^2) / 2 a
# read. With the initial deviation of 0.02, mean(h^2) is 4e-4 and even eps 1e-12 leaves 1e-7; with one of D^(-1/2),
# which keeps activations near 1, it leaves 1e-10.
REACHED = pytest.mark.parametrize(("init_std", "tolerance"), [(0.02, 1e-6), (48**-0.5, 2e-10)])


@REACHED
@pytest.mark.parametrize(
    ("architecture", "settings", "layers"),
    [
        *[("block_attnres", {"sublayers_per_block": b}, 4) for b in (1, 2, 3, 5, 8)],
        *[("block_attnres", {"sublayers_per_block": b}, 12) for b in (1, 5)],  # with two-phase reads
        ("block_attnres", {"sublayers_per_block": 3, "key_norm": False, "temperature": 0.5}, 4),
        *[("hc", {"num_streams": n}, 4) for n in (1, 2, 4)],
        ("hc", {"num_streams": 4}, 12),
    ],
)
def test_equal_to_pre_ln(
    architecture: str, settings: dict[str, Any], layers: int, init_std: float, tolerance: float
) -> None:
    """The gap is eps's alone: it is proportional to it, down to rounding (conventions 16)."""
    model = {"num_layers": layers, "init_std": init_std}
    ((distance, of_larger_eps),) = run_workers(1, distance_from_pre_ln, architecture, settings, model)
    assert distance < tolerance
    assert of_larger_eps == pytest.approx(distance * EPS[1] / EPS[0], rel=0.1, abs=1e-12)


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


# -- Full Attention Residuals -----------------------------------------------------------------------------------------
def full(rank: int, world_size: int, store: str, runs: list[RunConfig], weights: Weights) -> list[Tensor]:
    """Each run's logits; a state holds the embedding and every sublayer's output as it was."""
    context = start_stage(rank, world_size, store, runs[0]).context
    found = []
    for run in runs:
        stage = build_stage(run, context)
        load_weights(stage, weights)
        outputs: list[Tensor] = []
        for name, module in stage.named_modules():
            if name.endswith((".attention", ".mlp")):
                module.register_forward_hook(lambda module, args, result: outputs.append(result[0]))  # noqa: B023
        tokens = torch.randint(0, run.model.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
        state = start(stage, tokens)
        embedding = state.history["source.0"]
        for k in range(2 * run.model.num_layers):
            state = run_sublayer(stage, k, state)
        assert not state.live
        for source, output in zip(state.history.values(), [embedding, *outputs], strict=True):
            assert torch.equal(source, output)
        found.append(stage.logits(state).detach())
    return found


def test_blocks_of_one_sublayer_are_full_attention_residuals() -> None:
    """With random queries; see tests/reference for Full AttnRes written out."""
    architecture, settings = shipped("full_attnres")
    runs = [small_run(architecture, s) for s in (settings, {"sublayers_per_block": 1}, {"num_blocks": 8})]
    weights = random_weights(reference_shape(runs[0]), architecture, torch.Generator().manual_seed(1))
    ((logits, *others),) = run_workers(1, full, runs, {name: weight.detach() for name, weight in weights.items()})
    assert all(torch.equal(other, logits) for other in others)


# -- the same everywhere, and nowhere twice ---------------------------------------------------------------------------
def initial(rank: int, world_size: int, store: str, run: RunConfig) -> Pieces:
    return pieces(start_stage(rank, world_size, store, run), "data")


def weights_of(name: str, world_size: int = 1, seed: int = 0, **parallel: Any) -> Weights:
    architecture, settings = shipped(name)
    return weights_with(architecture, settings, world_size, seed, **parallel)


def weights_with(
    architecture: str, settings: dict[str, Any], world_size: int = 1, seed: int = 0, **parallel: Any
) -> Weights:
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


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "full recompute": (1, {"recompute": "full"}),
}


@pytest.mark.parametrize(("layout", "seed"), [("one", 0), ("one", 1), *((layout, 2) for layout in LAYOUTS)])
@pytest.mark.parametrize("name", ["full_attnres", "block_attnres"])
def test_queries_start_at_zero(name: str, layout: str, seed: int) -> None:
    world_size, parallel = LAYOUTS[layout]
    weights = weights_of(name, world_size, seed, **parallel)
    queries = [tensor for key, tensor in weights.items() if key.endswith("query")]
    gains = [tensor for key, tensor in weights.items() if "key_norm" in key]
    assert len(queries) == len(gains) == 8  # seven sublayers and the readout
    assert not any(bool(query.any()) for query in queries)
    assert all(bool((gain == 1).all()) for gain in gains)


# -- HC's and mHC's routing -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [1, 2, 4])
def test_hyper_connections_read_and_keep_one_stream(n: int) -> None:
    """Sublayer k reads stream k mod n; nothing depends on the token yet. All streams are equal, so that no output would
    show another choice."""
    weights = weights_with("hc", {"num_streams": n})
    for k in range(8):
        name = f"blocks.{k // 2}.{('attention', 'mlp')[k % 2]}_residual"
        read, mix = weights[f"{name}.static_alpha"].split([1, n], -1)
        assert read.flatten().tolist() == [float(s == k % n) for s in range(n)]
        assert torch.equal(mix, torch.eye(n, dtype=mix.dtype))
        assert (weights[f"{name}.static_beta"] == 1).all()
        for part in ("alpha", "beta"):
            assert not weights[f"{name}.dynamic_{part}"].any()
            assert float(weights[f"{name}.dynamic_{part}_scale"]) == pytest.approx(0.01)


Routing = tuple[Tensor, Tensor, Tensor]
"""A sublayer's pre [S, B, n], R [S, B, n, n] and post [S, B, n]."""


def first_routing(
    rank: int, world_size: int, store: str, settings: dict[str, Any], zero_phi: bool
) -> tuple[list[Routing], list[Tensor]]:
    """Of every sublayer, and its phi."""
    stage = start_stage(rank, world_size, store, small_run("mhc", settings))
    phis = [parameter.detach().clone() for name, parameter in stage.named_parameters() if name.endswith("phi")]
    if zero_phi:
        for name, parameter in stage.named_parameters():
            parameter.data.mul_(0 if name.endswith("phi") else 1)
    read_with: list[Tensor] = []
    original = mhc.read_streams

    def spy(streams_SBND: Tensor, weight_SBN: Tensor) -> Tensor:
        read_with.append(weight_SBN.detach())
        return original(streams_SBND, weight_SBN)

    mhc.read_streams = spy  # this process ends with the test
    state = start(stage, torch.randint(0, 150, (2, 16), generator=torch.Generator().manual_seed(0)))
    found = []
    for k in range(8):
        block: Any = stage.blocks[str(k // 2)]
        mixing, post = (block.mlp_residual if k % 2 else block.attention_residual)(state).carry
        found.append((read_with[-1], mixing.detach(), post.detach()))
        state = run_sublayer(stage, k, state)
    return found, phis


def assert_routing(found: Routing, pre: Tensor, mixing: Tensor, post: float, tolerance: float) -> None:
    for one, other in zip(found, (pre, mixing, torch.full_like(pre, post)), strict=True):
        torch.testing.assert_close(one, other.double().expand_as(one), rtol=0, atol=tolerance)


@pytest.mark.parametrize("n", [2, 4])
def test_near_uniform_routing(n: int) -> None:
    """pre 1/2, post 1, R 1/n: exactly so without phi, which moves them by a hundredth of x phi, of deviation
    0.02 (n D)^(1/2) = 0.28 at n = 4."""
    settings = {"num_streams": n, "init": "near_uniform"}
    half, uniform = torch.full((n,), 0.5), torch.full((n, n), 1 / n)
    ((drawn, phis),) = run_workers(1, first_routing, settings, False)
    ((without_phi, _),) = run_workers(1, first_routing, settings, True)
    for found, exact in zip(drawn, without_phi, strict=True):
        assert_routing(found, half, uniform, 1.0, 1e-2)
        assert_routing(exact, half, uniform, 1.0, 1e-6)  # Sinkhorn's eps
        assert all(tensor.unique().numel() > 10 for tensor in found)
    values = torch.cat([phi.flatten() for phi in phis]) / 0.02
    assert 2.9 < values.abs().max() <= 3
    assert abs(float(values.mean())) < 4 / math.sqrt(values.numel())
    assert float(values.std()) == pytest.approx(0.98658, abs=4 / math.sqrt(2 * values.numel()))


@pytest.mark.parametrize(("eps", "tolerance"), [(0.0, 6e-7), (1e-6, 5e-6)])  # the numbers' digits; Sinkhorn's eps
def test_gap8_routing(eps: float, tolerance: float) -> None:
    """Sublayer k reads stream k mod n, every stream gets the output once, and R is nearly the identity."""
    ((found, phis),) = run_workers(1, first_routing, {"num_streams": 4, "sinkhorn_eps": eps}, False)
    identity = torch.eye(4)
    for k, routing in enumerate(found):
        pre = 0.000335 + (0.999665 - 0.000335) * identity[k % 4]
        mixing = 0.000335 + (0.998995 - 0.000335) * identity
        assert_routing(routing, pre, mixing, 1.0, tolerance)
    assert not any(bool(phi.any()) for phi in phis)


def test_routing_scales_and_biases() -> None:
    for init in ("gap8", "near_uniform"):
        weights = weights_with("mhc", {"init": init})
        scales = [tensor for key, tensor in weights.items() if "_residual.scale_" in key]
        assert len(scales) == 3 * 8 and all(float(scale) == pytest.approx(0.01) for scale in scales)
        biases = [tensor for key, tensor in weights.items() if key.endswith("_residual.bias")]
        assert len(biases) == 8 and all(bool(bias.any()) == (init == "gap8") for bias in biases)


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
