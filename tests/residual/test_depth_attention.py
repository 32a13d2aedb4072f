"""The depth read against its formula, written naively: values, gradients, precision and what it keeps for backward."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from depthbench.residual.depth_attention import Ahead, attend_ahead, depth_attention

S, B, D = 5, 3, 37  # tokens, microbatch, a width that is no power of two
EPS = 1e-5


def naive_logits(sources: Sequence[Tensor], w: Tensor, eps: float | None) -> Tensor:
    keys = torch.stack(list(sources))
    if eps is not None:
        keys = keys / torch.sqrt(keys.square().mean(-1, keepdim=True) + eps)
    return (keys * w).sum(-1)


def naive(sources: Sequence[Tensor], query: Tensor, gain: Tensor | float = 1.0, eps: float | None = EPS) -> Tensor:
    weights = torch.softmax(naive_logits(sources, query * gain, eps), 0)
    return (weights.unsqueeze(-1) * torch.stack(list(sources))).sum(0)


def leaves(count: int, width: int = D, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """`count` sources of growing size, then a query and a gain that make the softmax far from flat."""
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sources = [(scale * (1 + n / 4) * draw(S, B, width)).to(dtype) for n in range(count)]
    wide = torch.promote_types(dtype, torch.float32)
    read = [(2 * draw(width) / width**0.5).to(wide), (1 + 0.3 * draw(width)).to(wide)]
    return [tensor.requires_grad_() for tensor in (*sources, *read)]


def gradients(function: Any, tensors: list[Tensor], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    *sources, query, gain = tensors
    mixed = function(sources, query, gain)
    return mixed.detach(), list(torch.autograd.grad(mixed, tensors, upstream.to(mixed)))


def ours(sources: Sequence[Tensor], query: Tensor, gain: Tensor) -> Tensor:
    return depth_attention(sources, query * gain, EPS)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e3])  # eps is felt; eps is not; large sources
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_float64(count: int, scale: float) -> None:
    tensors = leaves(count, scale=scale)
    upstream = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    mixed, found = gradients(ours, tensors, upstream)
    expected, wanted = gradients(naive, tensors, upstream)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-14 * scale)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12 * max(float(other.abs().max()), 1e-30))


def test_without_key_norm() -> None:
    *sources, query, _ = leaves(6)
    mixed, expected = depth_attention(sources, query, None), naive(sources, query, eps=None)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-14)
    found, wanted = (torch.autograd.grad(z.square().sum(), [*sources, query]) for z in (mixed, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12 * float(other.abs().max()))


def test_gradcheck() -> None:
    tensors = leaves(4, width=5)
    torch.autograd.gradcheck(lambda *t: depth_attention(t[:-2], t[-2] * t[-1], EPS), tensors)


def test_only_needed_gradients_are_made() -> None:
    """A source that is a constant, and one that is used twice."""
    first, second, query, gain = leaves(2)
    mixed = depth_attention([first.detach(), second, second], query * gain, EPS)
    mixed.square().sum().backward()
    wanted = torch.autograd.grad(naive([first.detach(), second, second], query, gain).square().sum(), second)[0]
    assert first.grad is None
    assert second.grad is not None
    torch.testing.assert_close(second.grad, wanted, rtol=1e-10, atol=1e-12)


def test_extreme_logits() -> None:
    """Logits in the thousands: the largest wins, and nothing is lost to overflow."""
    sources = [torch.full((1, 1, D), value, dtype=torch.float64) for value in (-1.0, 1.0, 2.0)]
    query, gain = torch.full((D,), 100.0, dtype=torch.float64), torch.ones(D, dtype=torch.float64)
    mixed = depth_attention(sources, query * gain, 0.0)
    torch.testing.assert_close(mixed, torch.full((1, 1, D), 1.5, dtype=torch.float64))


@pytest.mark.parametrize("count", [2, 40])
def test_bfloat16_is_rounded_once(count: int) -> None:
    """With bfloat16 sources everything inside is float32: against float64 of the same values, the output and the
    sources' gradients are off by their own rounding (2^-8) and by nothing else."""
    tensors = leaves(count, width=300, dtype=torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    upstream = torch.randn(S, B, 300, generator=torch.Generator().manual_seed(9)).bfloat16()
    mixed, found = gradients(ours, tensors, upstream)
    expected, wanted = gradients(naive, wide, upstream)
    assert mixed.dtype is torch.bfloat16
    for one, other in zip([mixed, *found], [expected, *wanted], strict=True):
        rounding = 2**-8 if one.dtype is torch.bfloat16 else 0.0
        error = (one.double() - other).abs() - rounding * other.abs() * 1.01
        assert float(error.max() / other.abs().max()) < 2e-5
    assert [g.dtype for g in found] == [torch.bfloat16] * count + [torch.float32] * 2


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def saved(function: Callable[[], list[Tensor]], given: Sequence[Tensor]) -> tuple[int, list[Tensor]]:
    """Bytes kept for backward beyond `given` and what the function returns, and every tensor kept."""
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        returned = function()
    own = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(own[place] for place in own.keys() - {storage(tensor) for tensor in (*given, *returned)}), kept


@pytest.mark.parametrize("count", [1, 2, 10, 40])
def test_what_is_kept_for_backward(count: int) -> None:
    """Two float32 numbers a source and token, and references: no stack of sources."""
    *sources, w, _ = leaves(count, dtype=torch.bfloat16)
    extra, kept = saved(lambda: [depth_attention(sources, w, EPS)], [*sources, w])
    assert extra == count * 2 * S * B * 4
    assert max(tensor.numel() for tensor in kept) <= max(S * B * D, count * S * B)
    assert sum(tensor.numel() == S * B * D for tensor in kept) == count


# -- in two phases ----------------------------------------------------------------------------------------------------
Group = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Sources ahead, later sources, queries (times gain)."""


def group(ahead: int, later: int, queries: int, width: int = D, dtype: torch.dtype = torch.float64) -> Group:
    *sources, _, _ = leaves(ahead + later, width, dtype=dtype)
    generator = torch.Generator().manual_seed(queries)
    draws = 2 * torch.randn(queries, width, generator=generator, dtype=torch.float64) / width**0.5
    wide = torch.promote_types(dtype, torch.float32)
    return sources[:ahead], sources[ahead:], [w.to(wide).requires_grad_() for w in draws]


def at_once(early: list[Tensor], late: list[Tensor], queries: list[Tensor], later: Any, eps: float | None) -> Tensor:
    """[Q, S, B, D]: query q over the sources ahead and `later[q]` later ones."""
    return torch.stack([naive([*early, *late[:n]], w, eps=eps) for n, w in zip(later, queries, strict=True)])


def in_two_phases(
    early: list[Tensor], late: list[Tensor], queries: list[Tensor], later: Any, eps: float | None
) -> Tensor:
    found = attend_ahead(early, queries, eps)
    merged = (depth_attention(late[:n], one.w_D, eps, one) for n, one in zip(later, found, strict=True))
    return torch.stack(list(merged))


def small_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, sources: int) -> None:
    """Tiles of `rows` tokens of `sources` float64 sources."""
    size = rows * sources * D * 8
    monkeypatch.setattr("depthbench.residual.depth_attention.TILE_BYTES", {"cpu": size})


LATER = [(0,), (1,), (4,), (0, 1, 2, 3, 4), (2, 0, 2)]  # later sources of each query


@pytest.mark.parametrize("rows", [None, 1, 4, 7])  # of 15 tokens: all at once, one by one, ragged tiles
@pytest.mark.parametrize("eps", [EPS, None])
@pytest.mark.parametrize("later", LATER, ids=str)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_two_phases(
    count: int, later: tuple[int, ...], eps: float | None, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every second source the memory runs as an embedding's does: microbatch first."""
    if rows:
        small_tiles(monkeypatch, rows, count)
    early, late, queries = group(count, max(later), len(later))
    tensors = [*early, *late, *queries]
    swapped = [v.transpose(0, 1).contiguous().transpose(0, 1) if n % 2 else v for n, v in enumerate([*early, *late])]
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(len(later), B, S, D, dtype=torch.float64, generator=generator).transpose(1, 2)
    mixed = in_two_phases(swapped[:count], swapped[count:], queries, later, eps)
    expected = at_once(early, late, queries, later, eps)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-14)
    found, wanted = (torch.autograd.grad(z, tensors, upstream) for z in (mixed, expected))
    scale = max(float(other.abs().max()) for other in wanted)  # one source alone gives its query none but rounding
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12 * scale)


def test_what_a_query_finds_ahead() -> None:
    early, _, queries = group(5, 0, 2)
    for one, w in zip(attend_ahead(early, queries, EPS), queries, strict=True):
        torch.testing.assert_close(one.mixed_SBD, naive(early, w), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(one.lse_SB, naive_logits(early, w, EPS).logsumexp(0), rtol=1e-12, atol=1e-14)
        assert (one.num_sources, one.dtype) == (5, torch.float64)


@pytest.mark.parametrize("eps", [EPS, None])
def test_gradcheck_of_two_phases(eps: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch, 1, 3)  # a few rows of this width
    early, late, queries = group(3, 2, 2, width=5)

    def function(*tensors: Tensor) -> Tensor:
        return in_two_phases(list(tensors[:3]), list(tensors[3:5]), list(tensors[5:]), (0, 2), eps)

    torch.autograd.gradcheck(function, [*early, *late, *queries])


def test_extreme_logits_in_two_phases() -> None:
    """Whether the largest logit, of thousands, is among the sources ahead or comes later."""
    sources = [torch.full((1, 1, D), value, dtype=torch.float64) for value in (-1.0, 1.0, 2.0, -2.0)]
    w = torch.full((D,), 100.0, dtype=torch.float64)
    for order in ((0, 1, 2, 3), (3, 0, 2, 1), (2, 1, 3, 0)):
        early, late = [sources[n] for n in order[:2]], [sources[n] for n in order[2:]]
        mixed = in_two_phases(early, late, [w], (2,), 0.0)[0]
        torch.testing.assert_close(mixed, torch.full((1, 1, D), 1.5, dtype=torch.float64))


def test_gradients_of_two_phases_repeat_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch, 4, 6)

    def once() -> list[Tensor]:
        early, late, queries = group(6, 2, 3)
        mixed = in_two_phases(early, late, queries, (0, 1, 2), EPS)
        return [mixed, *torch.autograd.grad(mixed.square().sum(), [*early, *late, *queries])]

    first, second = once(), once()
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_result_ahead_that_nobody_uses_gets_no_gradient() -> None:
    early, late, queries = group(4, 1, 3)
    found = attend_ahead(early, queries, EPS)
    mixed = torch.stack([depth_attention(late, found[q].w_D, EPS, found[q]) for q in (0, 2)])
    expected = at_once(early, late, [queries[0], queries[2]], (1, 1), EPS)
    unused, *used = torch.autograd.grad(mixed.square().sum(), [queries[1], *early, *late])
    assert not unused.any()
    for one, other in zip(used, torch.autograd.grad(expected.square().sum(), [*early, *late]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_constant_source_ahead_gets_no_gradient() -> None:
    early, late, queries = group(3, 1, 2)
    constant = early[1].detach()
    mixed = in_two_phases([early[0], constant, early[2]], late, queries, (0, 1), EPS)
    mixed.square().sum().backward()
    assert constant.grad is None and early[1].grad is None
    assert all(tensor.grad is not None for tensor in (early[0], early[2], *late, *queries))


def test_two_phases_in_bfloat16_round_once() -> None:
    """Output and sources' gradients are off by their own rounding, and by one effect more: backward takes <g, z> from
    the rounded z, so every logit's gradient P_n (<g, v_n> - <g, z>) is off by P_n <g, z's rounding>. With that put into
    the expected gradients nothing else is left; it is itself about as large as z's rounding."""
    width, later = 300, (0, 0, 3)  # later sources have one reader: gradients of several would be added in bfloat16
    early, late, queries = group(20, 3, 3, width, torch.bfloat16)
    tensors = [*early, *late, *queries]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(3, S, B, width, generator=generator).bfloat16()
    mixed = in_two_phases(early, late, queries, later, EPS)
    expected = at_once(wide[:20], wide[20:23], wide[23:], later, EPS)
    found = torch.autograd.grad(mixed, tensors, upstream)
    wanted = torch.autograd.grad(expected, wide, upstream.double(), retain_graph=True)
    rounding_QSB = (upstream.double() * (mixed.double() - expected).detach()).sum(-1)
    through_logits = []
    for rounding_SB, n, w in zip(rounding_QSB, later, wide[23:], strict=True):
        logits = naive_logits(wide[: 20 + n], w, EPS)
        through_logits.append((rounding_SB * torch.softmax(logits, 0).detach() * logits).sum())
    effects = torch.autograd.grad(torch.stack(through_logits).sum(), wide)

    assert mixed.dtype is torch.bfloat16
    with_effect = [other - effect for other, effect in zip(wanted, effects, strict=True)]
    for one, other in zip([mixed, *found], [expected, *with_effect], strict=True):
        rounding = 2**-8 if one.dtype is torch.bfloat16 else 0.0
        error = (one.double() - other).abs() - rounding * other.abs() * 1.01
        assert float(error.max() / other.abs().max()) < 2e-5
    for effect, other in zip(effects, wanted, strict=True):
        assert float(effect.abs().max() / other.abs().max()) < 2**-7
    assert [g.dtype for g in found] == [torch.bfloat16] * 23 + [torch.float32] * 3


@pytest.mark.parametrize("later", [(0,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 5, 20])
def test_what_two_phases_keep_for_backward(count: int, later: tuple[int, ...]) -> None:
    """References to the sources and to the outputs, a copy of the queries, and per token the sources' norms and every
    logit (and the log-sum-exp, which is a logit of the merge): no mixture found ahead."""
    early, late, queries = group(count, max(later), len(later), dtype=torch.bfloat16)
    found: list[Ahead] = []

    def both_phases() -> list[Tensor]:
        found.extend(attend_ahead(early, queries, EPS))
        return [depth_attention(late[:n], one.w_D, EPS, one) for n, one in zip(later, found, strict=True)]

    extra, kept = saved(both_phases, [*early, *late, *queries])
    assert {storage(tensor) for tensor in kept}.isdisjoint(storage(one.mixed_SBD) for one in found)
    scalars = count + count * len(later) + sum(n + n + 1 for n in later)
    assert extra == 4 * (S * B * scalars + len(later) * D)


class Reads(TorchDispatchMode):
    """Counts the elements of given tensors that operations read; views and `empty_like` read none."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.elements = {storage(tensor): 0 for tensor in tensors}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.empty_like.default:
            return result
        made = {storage(tensor) for tensor in tree_iter(result) if isinstance(tensor, Tensor)}
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor) and storage(tensor) in self.elements.keys() - made:
                self.elements[storage(tensor)] += tensor.numel()
        return result


def passes(sources: list[Tensor], function: Callable[[], Any]) -> tuple[set[float], Any]:
    """How often each of the sources is read, and the result."""
    with Reads(sources) as reads:
        result = function()
    return {elements / (S * B * D) for elements in reads.elements.values()}, result


@pytest.mark.parametrize("rows", [None, 4])
def test_a_group_reads_each_source_once(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, for any number of queries and tiles; reads one by one need several passes each."""
    if rows:
        small_tiles(monkeypatch, rows, 6)
    early, _, queries = group(6, 0, 4)

    def merged(found: list[Ahead]) -> Tensor:
        return torch.stack([depth_attention([], one.w_D, EPS, one) for one in found])

    read, found = passes(early, lambda: attend_ahead(early, queries, EPS))
    assert read == {1.0}
    read, mixed = passes(early, lambda: merged(found))
    assert read == {0.0}
    read, _ = passes(early, lambda: torch.autograd.grad(mixed.sum(), [*early, *queries]))
    assert read == {1.0}
    read, _ = passes(early, lambda: [depth_attention(early, w, EPS) for w in queries])
    assert min(read) >= len(queries)
