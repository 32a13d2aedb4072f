"""The references against properties the fact sheets state and against second, differently written loops."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from . import mhc
from .layers import Shape, rope, sublayer, sublayer_name
from .model import reference_logits, reference_loss
from .weights import parameter_shapes, random_weights

SMALL = Shape(3, 16, 24, num_heads=4, num_kv_heads=2, head_dim=4, vocab_size=11)
CASES: list[tuple[str, dict[str, Any]]] = [("pre_ln", {}), ("hc", {}), ("hc", {"num_streams": 3}), ("moda", {})]
CASES += [("hc", {"readout": "norm_then_sum"}), ("moda", {"norm": "post"})]
CASES += [("sandwich_ln", {}), ("lns", {}), ("deepnorm", {}), ("keel", {}), ("mhc", {}), ("mhc", {"num_streams": 3})]
CASES += [("mhc", {"sinkhorn_order": "columns_first", "sinkhorn_eps": eps}) for eps in (1e-6, 0.0)]
CASES += [("block_attnres", {"sublayers_per_block": b}) for b in (1, 2, 3, 4, 7)]
CASES += [("block_attnres", {"sublayers_per_block": 2, "key_norm": False})]
ANY = pytest.mark.parametrize("architecture, options", CASES)
EPS = 1e-14
# mHC: equal streams reach the first norm, which drops their scale, and a first R whose rows sum to 1 keeps them equal;
# the mean of streams does not see a last R whose columns sum to 1
FIRST, LAST = "blocks.0.attention_residual", "blocks.2.mlp_residual"
MHC_WITHOUT_EFFECT = {
    "rows_first": {f"{FIRST}.scale_pre", f"{LAST}.scale_res"},
    "columns_first": {f"{FIRST}.scale_pre", f"{FIRST}.scale_res"},
}
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
    idle = MHC_WITHOUT_EFFECT[options.get("sinkhorn_order", "rows_first")] if architecture == "mhc" else set()
    for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
        if name in idle:
            assert gradient.abs().max() < 1e-5, name
        else:
            assert gradient.abs().max() > 1e-6, name


def test_parameter_totals_of_the_paper() -> None:
    shape = Shape(24, 1024, 2736, num_heads=16, num_kv_heads=16, head_dim=64, vocab_size=50280)
    expected = {"pre_ln": 405_406_720, "block_attnres": 405_505_024, "hc": 405_702_880, "moda": 453_641_216}
    expected |= {"sandwich_ln": 405_455_872, "lns": 405_406_720, "deepnorm": 405_406_720, "keel": 405_454_848}
    expected |= {"mhc": 410_126_608}
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


def read(weights: dict[str, Tensor], name: str, sources: list[Tensor], key_norm: bool) -> Tensor:
    stack = torch.stack(sources)
    keys = F.rms_norm(stack, (16,), weights[f"{name}.key_norm.weight"], 1e-5) if key_norm else stack
    p = torch.einsum("d,nbtd->nbt", weights[f"{name}.query"], keys).softmax(dim=0)
    return torch.einsum("nbt,nbtd->btd", p, stack)


@pytest.mark.parametrize("key_norm", [True, False])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_attnres_from_all_outputs(length: int, key_norm: bool) -> None:
    """Keep every raw output and sum the blocks anew for each read; length 1 is literally Full AttnRes."""
    weights, tokens = example("block_attnres", key_norm=key_norm)
    assert any("key_norm" in name for name in weights) == key_norm
    outputs = [weights["embedding.weight"][tokens]]
    for k in range(7):
        branches = outputs[1:]
        sources = [outputs[0], *(torch.stack(branches[j : j + length]).sum(dim=0) for j in range(0, k, length))]
        name = "readout" if k == 6 else sublayer_name(k) + "_residual"
        mixed = outputs[0] if k == 0 else read(weights, name, sources, key_norm)
        x = F.rms_norm(mixed, (16,), weights[f"{name}.norm.weight"], 1e-6 if k == 0 else 1e-5)
        outputs.append(x if k == 6 else sublayer(weights, k, x, SMALL))
    out = reference_logits(weights, tokens, SMALL, "block_attnres", sublayers_per_block=length, key_norm=key_norm)
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


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_moda_by_masked_attention_over_all_keys(norm: str) -> None:
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

    def normalised(x: Tensor, name: str, when: str) -> Tensor:
        return F.rms_norm(x, (16,), weights[f"{name}_residual.norm.weight"], 1e-6) if norm == when else x

    for i in range(3):
        block = f"blocks.{i}"
        x = normalised(h, f"{block}.attention", "pre")
        q, k, v = (heads(x, f"{block}.attention.{part}") for part in "qkv")
        all_k = torch.cat([turn(k), *depth_k], dim=2).repeat_interleave(2, dim=1)
        all_v = torch.cat([v, *depth_v], dim=2).repeat_interleave(2, dim=1)
        seen = torch.cat([torch.ones(6, 6).tril(), torch.eye(6).repeat(1, 2 * i)], dim=1).bool()
        out = F.scaled_dot_product_attention(turn(q), all_k, all_v, attn_mask=seen)
        h = h + F.linear(out.transpose(1, 2).reshape(2, 6, 16), weights[f"{block}.attention.out.weight"])
        h = normalised(h, f"{block}.attention", "post")
        x = normalised(h, f"{block}.mlp", "pre")
        gate, up, down = (weights[f"{block}.mlp.{part}.weight"] for part in ("gate", "up", "down"))
        h = normalised(h + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), f"{block}.mlp", "post")
        if i < 2:
            depth_k += [k, heads(x, f"{block}.mlp_residual.depth_k")]
            depth_v += [v, heads(x, f"{block}.mlp_residual.depth_v")]
    x = F.rms_norm(h, (16,), weights["readout.norm.weight"], 1e-6)
    same(reference_logits(weights, tokens, SMALL, "moda", norm=norm), F.linear(x, weights["head.weight"]))


@pytest.mark.parametrize("architecture", ["sandwich_ln", "lns", "deepnorm", "keel"])
@pytest.mark.parametrize(("eps", "post_eps"), [(1e-6, 1e-6), (0.1, 0.01)])
def test_single_stream_variants_with_their_constants_written_out(
    architecture: str, eps: float, post_eps: float
) -> None:
    weights, tokens = example(architecture)
    options = {"eps": eps} | ({"post_norm_eps": post_eps} if architecture in ("sandwich_ln", "keel") else {})
    h = weights["embedding.weight"][tokens]
    for k, block in enumerate([1, 1, 2, 2, 3, 3]):
        name = sublayer_name(k) + "_residual"
        w, post = weights[f"{name}.norm.weight"], weights.get(f"{name}.post_norm.weight")
        x = h if architecture == "deepnorm" else F.rms_norm(h, (16,), w, eps)
        y = sublayer(weights, k, x * block**-0.5 if architecture == "lns" else x, SMALL)
        if architecture == "lns":
            h = h + y
        elif architecture == "sandwich_ln":
            h = h + F.rms_norm(y, (16,), post, post_eps)
        elif architecture == "deepnorm":
            h = F.layer_norm(1.5650845800732873 * h + y, (16,), w, None, eps)
        else:
            assert (post is None) == (k == 0)
            h = h + y if post is None else F.rms_norm((1.0 if k == 1 else 6.0) * h + y, (16,), post, post_eps)
    x = F.rms_norm(h, (16,), weights["readout.norm.weight"], eps)
    same(reference_logits(weights, tokens, SMALL, architecture, **options), F.linear(x, weights["head.weight"]))


def test_lns_is_pre_ln_with_smaller_gains() -> None:
    weights, tokens = example("lns")
    factor = {
        f"blocks.{i}.{part}_residual.norm.weight": (i + 1) ** -0.5 for i in range(3) for part in ("attention", "mlp")
    }
    scaled = {name: w * factor.get(name, 1.0) for name, w in weights.items()}
    same(reference_logits(weights, tokens, SMALL, "lns"), reference_logits(scaled, tokens, SMALL, "pre_ln"))


def test_sandwich_ln_forgets_the_scale_of_a_branch() -> None:
    weights, tokens = example("sandwich_ln")
    larger = {n: 5 * w if n.endswith((".out.weight", ".down.weight")) else w for n, w in weights.items()}
    out = reference_logits(weights, tokens, SMALL, "sandwich_ln", post_norm_eps=EPS)
    same(reference_logits(larger, tokens, SMALL, "sandwich_ln", post_norm_eps=EPS), out)


@pytest.mark.parametrize("architecture", ["deepnorm", "keel"])
def test_branches_alpha_times_larger_make_alpha_1(architecture: str) -> None:
    """N(alpha h + alpha y) = N(h + y), whatever the architecture."""
    weights, tokens = example(architecture)
    h, larger = weights["embedding.weight"][tokens], dict(weights)
    for k in range(6):
        name = sublayer_name(k) + "_residual"
        alpha = 6**0.25 if architecture == "deepnorm" else 6.0 if k >= 2 else 1.0
        last = f"{sublayer_name(k)}.{('out', 'down')[k % 2]}.weight"
        larger[last] = alpha * weights[last]
        if architecture == "deepnorm":
            h = F.layer_norm(h + sublayer(weights, k, h, SMALL), (16,), weights[f"{name}.norm.weight"], None, EPS)
        else:
            h = h + sublayer(weights, k, F.rms_norm(h, (16,), weights[f"{name}.norm.weight"], EPS), SMALL)
            h = F.rms_norm(h, (16,), weights[f"{name}.post_norm.weight"], EPS) if k > 0 else h
    x = F.rms_norm(h, (16,), weights["readout.norm.weight"], EPS)
    eps = {"eps": EPS} | ({"post_norm_eps": EPS} if architecture == "keel" else {})
    same(reference_logits(larger, tokens, SMALL, architecture, **eps), F.linear(x, weights["head.weight"]))


@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.0])
def test_sinkhorn_by_hand(eps: float) -> None:
    """Plain numbers, entry by entry: p[out][in], rows before columns, eps in the start and in every denominator; then
    columns before rows, which is the same on the transposed matrix."""
    logits = [[0.3, -1.2, 2.0], [1.1, 0.4, -0.7], [-2.0, 0.9, 0.1]]
    for iterations in (1, 2, 20):
        p = [[math.exp(e) / sum(map(math.exp, row)) + eps for e in row] for row in logits]
        for i in range(iterations):
            if i > 0:
                p = [[e / (sum(row) + eps) for e in row] for row in p]
            columns = [sum(row[s] for row in p) + eps for s in range(3)]
            p = [[e / c for e, c in zip(row, columns, strict=True)] for row in p]
        matrix, expected = torch.tensor(logits, dtype=torch.float64), torch.tensor(p, dtype=torch.float64)
        same(mhc.sinkhorn(matrix, iterations, "rows_first", eps), expected)
        same(mhc.sinkhorn(matrix.T, iterations, "columns_first", eps), expected.T)


@pytest.mark.parametrize("n", [3, 4])
def test_mhc_in_matrix_form(n: int) -> None:
    """H <- R H + post y^T with phi as n blocks of D rows, one per stream."""
    weights, tokens = example("mhc", num_streams=n)
    streams = weights["embedding.weight"][tokens][:, :, None].expand(-1, -1, n, -1)  # [B, T, n, D]
    for k in range(6):
        name = sublayer_name(k) + "_residual"
        phi = weights[f"{name}.phi"].reshape(n, 16, n * n + 2 * n)
        m = torch.einsum("btsd,sdc->btc", streams, phi) * (streams.square().mean(dim=(2, 3)) + 1e-6)[..., None].rsqrt()
        scale = [weights[f"{name}.scale_{part}"].expand(c) for part, c in (("pre", n), ("post", n), ("res", n * n))]
        pre, post, res = (m * torch.cat(scale) + weights[f"{name}.bias"]).split([n, n, n * n], dim=-1)
        p = mhc.sinkhorn(res.reshape(2, 6, n, n), 20)
        u = torch.einsum("bts,btsd->btd", pre.sigmoid(), streams)
        y = sublayer(weights, k, F.rms_norm(u, (16,), weights[f"{name}.norm.weight"], 1e-6), SMALL)
        streams = p @ streams + (1 + (post / 2).tanh())[..., None] * y[:, :, None]
    x = F.rms_norm(streams.mean(dim=2), (16,), weights["readout.norm.weight"], 1e-6)
    same(reference_logits(weights, tokens, SMALL, "mhc", num_streams=n), F.linear(x, weights["head.weight"]))


def test_mhc_mixing_is_far_from_symmetric(monkeypatch: pytest.MonkeyPatch) -> None:
    """What random_weights promises: a transposed Sinkhorn would show, and so would the other order."""
    weights, tokens = example("mhc")
    out = reference_logits(weights, tokens, SMALL, "mhc")
    seen = []
    original = mhc.sinkhorn

    def spy(logits: Tensor, *options: Any) -> Tensor:
        seen.append(original(logits, *options))
        return seen[-1].mT

    monkeypatch.setattr(mhc, "sinkhorn", spy)
    assert (reference_logits(weights, tokens, SMALL, "mhc") - out).norm() > 0.03 * out.norm()
    for r in seen:
        torch.testing.assert_close(r.sum(dim=-2), torch.ones_like(r[..., 0]), rtol=0, atol=2e-6)
        assert (r - r.mT).abs().amax(dim=(-1, -2)).mean() > 0.2
    monkeypatch.undo()
    other = reference_logits(weights, tokens, SMALL, "mhc", sinkhorn_order="columns_first")
    assert (other - out).norm() > 3e-4 * out.norm()
    without_eps = reference_logits(weights, tokens, SMALL, "mhc", sinkhorn_eps=0.0)
    assert (without_eps - out).norm() > 1e-6 * out.norm()


def test_sinkhorn_sums() -> None:
    """Rows first: column sums are 1, row sums only nearly, less so for larger logits. Columns first: the reverse."""
    logits = torch.randn(200, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one = torch.ones(200, 4, dtype=torch.float64)
    for spread, tolerance in ((0.5, 1e-5), (2.0, 0.2)):
        for order, exact in (("rows_first", -2), ("columns_first", -1)):
            r = mhc.sinkhorn(spread * logits, 20, order)
            torch.testing.assert_close(r.sum(dim=exact), one, rtol=0, atol=2e-6)
            torch.testing.assert_close(r.sum(dim=-3 - exact), one, rtol=0, atol=tolerance)


def test_mhc_streams_may_change_places() -> None:
    weights, tokens = example("mhc")
    renamed = dict(weights)
    turn = torch.tensor([2, 0, 3, 1])
    order = torch.cat([turn, 4 + turn, 8 + torch.arange(16).reshape(4, 4)[turn][:, turn].reshape(-1)])
    for k in range(6):
        name = sublayer_name(k) + "_residual"
        renamed[f"{name}.phi"] = weights[f"{name}.phi"].reshape(4, 16, 24)[turn].reshape(64, 24)[:, order]
        renamed[f"{name}.bias"] = weights[f"{name}.bias"][order]
    same(reference_logits(renamed, tokens, SMALL, "mhc"), reference_logits(weights, tokens, SMALL, "mhc"))


def test_mhc_with_identity_routing_is_pre_ln() -> None:
    weights, tokens = example("mhc")
    for k in range(6):
        name = sublayer_name(k) + "_residual"
        pre = 80 * F.one_hot(torch.tensor(k % 4), 4).double() - 40
        weights[f"{name}.bias"] = torch.cat([pre, torch.zeros(4), 40 * torch.eye(4).flatten() - 40])
        weights[f"{name}.phi"] = torch.zeros(64, 24).double()
    out = reference_logits(weights, tokens, SMALL, "mhc", eps=EPS)
    expected = reference_logits(weights, tokens, SMALL, "pre_ln", eps=EPS)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for options in ({}, {"readout": "sum_then_norm"}, {"sinkhorn_order": "columns_first"}):
        same(reference_logits(weights, tokens, SMALL, "mhc", eps=EPS, sinkhorn_eps=0.0, **options), expected)


def test_mhc_readouts_differ_by_the_eps_of_the_norm() -> None:
    weights, tokens = example("mhc")
    mean, total = (
        [reference_logits(weights, tokens, SMALL, "mhc", eps=eps, readout=f"{how}_then_norm") for eps in (EPS, 0.1)]
        for how in ("mean", "sum")
    )
    same(mean[0], total[0])
    assert (mean[1] - total[1]).abs().max() > 1e-3
