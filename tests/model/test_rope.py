"""Rotary embedding: its rotation as complex numbers, its tables' precision, its scalings against transformers'."""

from typing import Any

import pytest
import torch

from depthbench.model.config import ModelConfig
from depthbench.model.rope import Rope
from depthbench.model.rope_scaling import RopeScaling, inverse_frequencies

LENGTH = 2048


def config(head_dim: int = 64, theta: float = 10000.0, scaling: RopeScaling | None = None) -> ModelConfig:
    return ModelConfig(
        num_layers=1,
        hidden_size=4 * head_dim,
        ffn_hidden_size=8,
        num_attention_heads=4,
        vocab_size=8,
        sequence_length=LENGTH,
        rope_theta=theta,
        rope_scaling=scaling,
    )


@pytest.mark.parametrize("head_dim", [2, 6, 76])
@pytest.mark.parametrize("theta", [500.0, 10000.0])
def test_rotation_is_a_complex_product(head_dim: int, theta: float) -> None:
    """The pair (i, i + K/2) of position t turns by t theta^(-2i/K)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 2, 3, head_dim, generator=generator, dtype=torch.float64)
    numbers = torch.complex(*x.chunk(2, -1))
    turn = torch.outer(torch.arange(50.0), theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))
    turned = numbers * torch.polar(torch.ones_like(turn), turn)[:, None, None, :]
    rotated = Rope(config(head_dim, theta)).rotate(x)
    torch.testing.assert_close(rotated, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-12)


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unbind()
    rope = Rope(config())
    qs, ks = (rope.rotate(t.expand(400, 1, 1, 64).contiguous()).flatten(1) for t in (q, k))
    for distance in (0, 1, 100, 399):
        along = (qs @ ks.T).diagonal(-distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tables_in_the_promoted_dtype(dtype: torch.dtype) -> None:
    """Angles are float64 always; rounded once, so that position 2047 is as exact as position 0."""
    cos, sin = Rope(config()).tables(LENGTH, torch.device("cpu"), dtype)
    wanted = torch.float64 if dtype is torch.float64 else torch.float32
    assert cos.dtype is sin.dtype is wanted
    angles = torch.outer(torch.arange(float(LENGTH)).double(), 1e4 ** (-torch.arange(32.0).double() / 32))
    tolerance = 1e-15 if wanted is torch.float64 else 6e-8
    for table, exact in ((cos, angles.cos()), (sin, angles.sin())):
        torch.testing.assert_close(table.flatten(1).double(), exact, rtol=0, atol=tolerance)


def test_bfloat16_is_rounded_once() -> None:
    x = torch.randn(LENGTH, 1, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rope = Rope(config())
    found, exact = rope.rotate(x), rope.rotate(x.double())
    assert found.dtype is torch.bfloat16
    assert ((found.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


def from_transformers(kind: str, length: int, **parameters: Any) -> tuple[torch.Tensor, float]:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers").LlamaConfig
    settings = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    model = llama(hidden_size=256, num_attention_heads=4, max_position_embeddings=length, rope_parameters=settings)
    frequencies, factor = utils.ROPE_INIT_FUNCTIONS[kind](model, torch.device("cpu"), seq_len=parameters.get("seen"))
    return frequencies, factor


@pytest.mark.parametrize("factor", [2.0, 8.0, 64.0])
@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_scalings_against_transformers(kind: str, factor: float) -> None:
    frequencies, scale = inverse_frequencies(64, 10000.0, RopeScaling(kind, factor, LENGTH))  # type: ignore[arg-type]
    if kind == "linear":
        wanted, wanted_scale = from_transformers("linear", LENGTH, factor=factor)
    elif kind == "ntk":  # theirs grows with the sequence seen; at factor 1 it has grown to `factor` after so many times
        wanted, wanted_scale = from_transformers("dynamic", LENGTH, factor=1.0, seen=int(factor * LENGTH))
    else:
        wanted, wanted_scale = from_transformers(
            "yarn", int(factor * LENGTH), factor=factor, original_max_position_embeddings=LENGTH
        )
    assert frequencies.dtype is torch.float64
    torch.testing.assert_close(frequencies.float(), wanted, rtol=2e-6, atol=0)
    assert scale == pytest.approx(wanted_scale, rel=1e-12)
    cos, _ = Rope(config(scaling=RopeScaling(kind, factor, LENGTH))).tables(1, torch.device("cpu"), torch.float64)  # type: ignore[arg-type]
    assert float(cos.max()) == pytest.approx(wanted_scale)


@pytest.mark.parametrize(("fast", "slow"), [(16.0, 2.0), (32.0, 32.0), (1e6, 1e-6)])
def test_yarn_bounds_against_transformers(fast: float, slow: float) -> None:
    ours, _ = inverse_frequencies(64, 10000.0, RopeScaling("yarn", 4.0, LENGTH, fast, slow))
    bounds = {"beta_fast": fast, "beta_slow": slow, "original_max_position_embeddings": LENGTH}
    wanted, _ = from_transformers("yarn", 4 * LENGTH, factor=4.0, **bounds)
    torch.testing.assert_close(ours.float(), wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 32.0)])
def test_llama3_against_transformers(low: float, high: float) -> None:
    scaling = RopeScaling("llama3", 8.0, LENGTH, low_freq_factor=low, high_freq_factor=high)
    ours, scale = inverse_frequencies(64, 10000.0, scaling)
    bounds = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": LENGTH}
    wanted, _ = from_transformers("llama3", 8 * LENGTH, factor=8.0, **bounds)
    torch.testing.assert_close(ours.float(), wanted, rtol=2e-6, atol=0)
    assert scale == 1.0
