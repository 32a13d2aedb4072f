"""The references against properties the fact sheets state and against second, differently written loops."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .layers import Shape, rope, sublayer, sublayer_name
from .model import reference_logits, reference_loss
from .weights import parameter_shapes, random_weights

SMALL = Shape(3, 16, 24, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=11)
CASES: list[tuple[str, dict[str, Any]]] = [("pre_ln", {}), ("hc", {}), ("hc", {"num_streams": 3}), ("moda", {})]
CASES += [("hc", {"readout": "norm_then_sum"})]
CASES += [("block_attnres", {"sublayers_per_block": b}) for b in (1, 2, 3, 4, 7)]
ANY = pytest.mark.parametrize("architecture, options", CASES)
EPS = 1e-14
PARTS = (("static", ""), ("dynamic", ""), ("dynamic", "_scale"))


def example(architecture: str, shape: Shape = SMALL, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(shape.vocab_size, (2, 6), generator=generator)
    return random_weights(shape, architecture, generator, **options), tokens


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@ANY
def test_logits_never_see_later_tokens(architecture: str, options: dict[str, Any]) -> None:
    weights, tokens = example(architecture, **options)
    changed = torch.cat([tokens[:, :4], (tokens[:, 4:] + 1) % SMALL.vocab_size], dim=1)
    before = reference_logits(weights, tokens, SMALL, architecture, **options)
    after = reference_logits(weights, changed, SMALL, architecture, **options)
    same(before[:, :4], after[:, :4])
    assert ((before - after)[:, 4:].abs().amax(dim=-1) > 1e-3).all()


@ANY
def test_loss_counts_masked_tokens_and_reaches_every_weight(architecture: str, options: dict[str, Any]) -> None:
    weights, tokens = example(architecture, **options)
    mask = torch.ones_like(tokens)
    mask[0, 2] = mask[1, 5] = 0
    labels = tokens.roll(-1, dims=1).masked_fill(mask == 0, -100)
    loss, count = reference_loss(weights, tokens, SMALL, architecture, labels=labels, mask=mask, **options)
    logits = reference_logits(weights, tokens, SMALL, architecture, **options)
    same(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"))
    assert count == 10
    for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
        assert gradient.abs().max() > 1e-6, name


def test_parameter_totals_of_the_paper() -> None:
    shape = Shape(24, 1024, 2736, num_heads=16, num_kv_heads=16, head_dim=64, vocab_size=50280)
    expected = {"pre_ln": 405_406_720, "block_attnres": 405_505_024, "hc": 405_702_880, "moda": 453_641_216}
    assert {a: sum(map(math.prod, parameter_shapes(shape, a).values())) for a in expected} == expected


def test_rope_is_a_complex_rotation() -> None:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    frequency = torch.tensor([1.0, 100 ** (-2 / 6), 100 ** (-4 / 6)], dtype=torch.float64)
    angle = torch.arange(5, dtype=torch.float64)[:, None] * frequency
    rotated = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * angle)
    same(rope(x, theta=100.0), torch.cat([rotated.real, rotated.imag], dim=-1))


def test_tied_head_is_the_embedding() -> None:
    weights, tokens = example("pre_ln")
    untied = reference_logits(weights | {"head.weight": weights["embedding.weight"]}, tokens, SMALL, "pre_ln")
    tied = replace(SMALL, tied=True)
    assert "head.weight" not in parameter_shapes(tied, "pre_ln")
    same(reference_logits({n: w for n, w in weights.items() if n != "head.weight"}, tokens, tied, "pre_ln"), untied)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 9])
def test_attnres_with_zero_queries_is_pre_ln(length: int) -> None:
    weights, tokens = example("block_attnres")
    weights = {name: torch.zeros_like(w) if name.endswith("query") else w for name, w in weights.items()}
    eps = {"key_norm_eps": EPS, "norm_eps": EPS, "first_norm_eps": EPS}
    out = reference_logits(weights, tokens, SMALL, "block_attnres", sublayers_per_block=length, **eps)
    same(out, reference_logits(weights, tokens, SMALL, "pre_ln", eps=EPS))


def read(weights: dict[str, Tensor], name: str, sources: list[Tensor]) -> Tensor:
    stack = torch.stack(sources)
    keys = F.rms_norm(stack, (16,), weights[f"{name}.key_norm.weight"], 1e-5)
    p = torch.einsum("d,nbtd->nbt", weights[f"{name}.query"], keys).softmax(dim=0)
    return torch.einsum("nbt,nbtd->btd", p, stack)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_attnres_from_all_outputs(length: int) -> None:
    """Keep every raw output and sum the blocks anew for each read; length 1 is literally Full AttnRes."""
    weights, tokens = example("block_attnres")
    outputs = [weights["embedding.weight"][tokens]]
    for k in range(7):
        branches = outputs[1:]
        sources = [outputs[0], *(torch.stack(branches[j : j + length]).sum(dim=0) for j in range(0, k, length))]
        name = "readout" if k == 6 else sublayer_name(k) + "_residual"
        mixed = outputs[0] if k == 0 else read(weights, name, sources)
        x = F.rms_norm(mixed, (16,), weights[f"{name}.norm.weight"], 1e-6 if k == 0 else 1e-5)
        outputs.append(x if k == 6 else sublayer(weights, k, x, SMALL))
    out = reference_logits(weights, tokens, SMALL, "block_attnres", sublayers_per_block=length)
    same(out, F.linear(outputs[-1], weights["head.weight"]))


def test_temperature_divides_the_queries() -> None:
    weights, tokens = example("block_attnres")
    halved = {name: w / 2 if name.endswith("query") else w for name, w in weights.items()}
    out = reference_logits(weights, tokens, SMALL, "block_attnres", sublayers_per_block=2, temperature=2.0)
    same(out, reference_logits(halved, tokens, SMALL, "block_attnres", sublayers_per_block=2))


def test_hc_with_identity_routing_is_pre_ln() -> None:
    weights, tokens = example("hc")
    for k in range(6):
        name = sublayer_name(k) + "_residual"
        first = F.one_hot(torch.tensor(k % 4), 4).double()
        weights[f"{name}.static_alpha"] = torch.cat([first[:, None], torch.eye(4).double()], dim=1)
        weights[f"{name}.static_beta"] = torch.ones(4).double()
        weights[f"{name}.dynamic_alpha"] = torch.zeros(16, 5).double()
        weights[f"{name}.dynamic_beta"] = torch.zeros(16).double()
    expected = reference_logits(weights, tokens, SMALL, "pre_ln", eps=EPS)
    same(reference_logits(weights, tokens, SMALL, "hc", eps=EPS), expected)
    same(reference_logits(weights, tokens, SMALL, "hc", eps=EPS, readout="norm_then_sum"), 4 * expected)


def test_hc_in_matrix_form() -> None:
    """M = alpha^T H: row 0 is the branch input, rows 1 .. n the mixed streams; H <- M[1:] + beta y^T."""
    weights, tokens = example("hc")
    streams = weights["embedding.weight"][tokens][:, :, None].expand(-1, -1, 4, -1)  # [B, T, n, D]
    for k in range(6):
        name = sublayer_name(k) + "_residual"
        static_a, w_a, s_a = (weights[f"{name}.{part}_alpha{end}"] for part, end in PARTS)
        static_b, w_b, s_b = (weights[f"{name}.{part}_beta{end}"] for part, end in PARTS)
        rows = F.rms_norm(streams, (16,), eps=1e-8)
        m = (static_a + s_a * (rows @ w_a).tanh()).mT @ streams  # [B, T, n + 1, D]
        y = sublayer(weights, k, F.rms_norm(m[:, :, 0], (16,), weights[f"{name}.norm.weight"], 1e-6), SMALL)
        beta = static_b + s_b * (rows @ w_b).tanh()
        streams = m[:, :, 1:] + torch.einsum("btn,btd->btnd", beta, y)
    x = F.rms_norm(streams.sum(dim=2), (16,), weights["readout.norm.weight"], 1e-6)
    same(reference_logits(weights, tokens, SMALL, "hc"), F.linear(x, weights["head.weight"]))


def test_moda_with_one_block_is_pre_ln() -> None:
    shape = replace(SMALL, num_layers=1)
    weights, tokens = example("moda", shape)
    same(reference_logits(weights, tokens, shape, "moda"), reference_logits(weights, tokens, shape, "pre_ln"))


def test_moda_by_masked_attention_over_all_keys() -> None:
    """Depth keys follow the sequence keys; a diagonal mask lets every token see its own depth keys alone."""
    weights, tokens = example("moda")
    h = weights["embedding.weight"][tokens]
    depth_k: list[Tensor] = []
    depth_v: list[Tensor] = []

    def heads(x: Tensor, name: str) -> Tensor:
        """[B, T, D] to [B, heads, T, K]."""
        return F.linear(x, weights[f"{name}.weight"]).reshape(2, 6, -1, 4).transpose(1, 2)

    def turn(x: Tensor) -> Tensor:
        return torch.stack([rope(head, 10000.0) for head in x.unbind(1)], dim=1)

    for i in range(3):
        block = f"blocks.{i}"
        x = F.rms_norm(h, (16,), weights[f"{block}.attention_residual.norm.weight"], 1e-6)
        q, k, v = (heads(x, f"{block}.attention.{part}") for part in "qkv")
        all_k = torch.cat([turn(k), *depth_k], dim=2).repeat_interleave(2, dim=1)
        all_v = torch.cat([v, *depth_v], dim=2).repeat_interleave(2, dim=1)
        seen = torch.cat([torch.ones(6, 6).tril(), torch.eye(6).repeat(1, 2 * i)], dim=1).bool()
        out = F.scaled_dot_product_attention(turn(q), all_k, all_v, attn_mask=seen)
        h = h + F.linear(out.transpose(1, 2).reshape(2, 6, 16), weights[f"{block}.attention.out.weight"])
        x = F.rms_norm(h, (16,), weights[f"{block}.mlp_residual.norm.weight"], 1e-6)
        gate, up, down = (weights[f"{block}.mlp.{part}.weight"] for part in ("gate", "up", "down"))
        h = h + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        if i < 2:
            depth_k += [k, heads(x, f"{block}.mlp_residual.depth_k")]
            depth_v += [v, heads(x, f"{block}.mlp_residual.depth_v")]
    x = F.rms_norm(h, (16,), weights["readout.norm.weight"], 1e-6)
    same(reference_logits(weights, tokens, SMALL, "moda"), F.linear(x, weights["head.weight"]))
