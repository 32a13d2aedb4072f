"""The history cache keeps each value from its first to its last reader and gathers what readers owe it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from depthbench.pipeline.cache import HistoryCache, Key

KEY: Key = (0, "source.1")


def values(seed: int, dtype: torch.dtype = torch.float64, count: int = 64) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# -- values -----------------------------------------------------------------------------------------------------------
def test_a_value_stays_until_its_last_reader() -> None:
    """Readers share its memory."""
    cache, made = HistoryCache(), values(1)
    cache.keep(KEY, made)
    for last in (False, False, True):
        taken = cache.take(KEY, last=last)
        assert torch.equal(taken, made) and taken.data_ptr() == made.data_ptr()
        assert (KEY in cache.values) is not last
    with pytest.raises(KeyError):
        cache.take(KEY, last=True)
    cache.assert_empty()


def test_what_is_kept_and_taken_is_cut_off_from_the_graph() -> None:
    """A reader's backward must end at its leaf."""
    cache = HistoryCache()
    made = values(1).requires_grad_() * 2
    cache.keep(KEY, made)
    assert not cache.values[KEY].requires_grad
    leaf = cache.take(KEY, last=True)
    assert leaf.is_leaf and leaf.requires_grad
    assert made.requires_grad, "the value in the chunk's own graph is untouched"


def test_a_value_is_kept_once() -> None:
    """A second one under its name would be an error of the plan."""
    cache = HistoryCache()
    cache.keep(KEY, values(1))
    with pytest.raises(AssertionError, match=r"\(0, 'source.1'\) is cached already"):
        cache.keep(KEY, values(2))


def test_bytes_are_counted() -> None:
    """Those held now and the most so far, over several values of different sizes and dtypes."""
    cache = HistoryCache()
    cache.keep((0, "a"), values(1, count=10))
    cache.keep((1, "a"), values(1, torch.bfloat16, count=6))
    assert (cache.bytes, cache.peak_bytes) == (92, 92)
    cache.take((0, "a"), last=False)
    assert (cache.bytes, cache.peak_bytes) == (92, 92)
    cache.take((0, "a"), last=True)
    assert (cache.bytes, cache.peak_bytes) == (12, 92)
    cache.keep((0, "b"), values(1, torch.float32, count=2))
    assert (cache.bytes, cache.peak_bytes) == (20, 92)
    cache.take((1, "a"), last=True)
    cache.take((0, "b"), last=True)
    assert (cache.bytes, cache.peak_bytes) == (0, 92)
    cache.clear()
    assert (cache.bytes, cache.peak_bytes) == (0, 0)


def test_what_is_left_after_a_step_is_named() -> None:
    """Values and gradients, five of them and how many more there are."""
    cache = HistoryCache()
    cache.assert_empty()
    cache.keep((3, "b"), values(1))
    cache.keep((2, "a"), values(1))
    with pytest.raises(AssertionError, match=r"still holds \[\(2, 'a'\), \(3, 'b'\)\] after a step"):
        cache.assert_empty()
    cache.take((3, "b"), last=True).sum().backward()
    with pytest.raises(AssertionError, match=r"still holds \[\(2, 'a'\), \(3, 'b'\)\] after a step"):
        cache.assert_empty()
    for microbatch in range(6):
        cache.keep((microbatch, "c"), values(1))
    with pytest.raises(AssertionError, match=r"\(1, 'c'\), \(2, 'a'\), \(2, 'c'\), \(3, 'b'\)\] and 3 more after"):
        cache.assert_empty()


def test_clear_forgets_an_interrupted_step() -> None:
    """Values and gradients; the next step starts as the first one did."""
    cache = HistoryCache()
    cache.keep(KEY, values(1))
    cache.take(KEY, last=False).sum().backward()
    assert cache.values and cache.pending
    cache.clear()
    cache.assert_empty()
    cache.keep(KEY, values(2))
    cache.take(KEY, last=True)
    grad = values(3)
    assert torch.equal(cache.deliver(KEY, grad), grad)


# -- gradients --------------------------------------------------------------------------------------------------------
Reader = Callable[[Tensor], Tensor]
READERS: list[Reader] = [lambda x: x.sin() * 3, lambda x: x**3 / 7, lambda x: (x * x.roll(1)).exp()]


def gradient(readers: list[Reader], made: Tensor, seed: int) -> Tensor:
    """Naively: of everything that reads `made`, at once."""
    leaf = made.clone().requires_grad_()
    torch.autograd.backward([reader(leaf) for reader in readers], [values(seed + i) for i in range(len(readers))])
    assert leaf.grad is not None
    return leaf.grad


def run_later(cache: HistoryCache, key: Key, readers: list[Reader], seed: int) -> list[Callable[[], None]]:
    """Takes for later chunks, one a reader; their backward passes."""

    def backward(out: Tensor, seed: int) -> None:
        out.backward(values(seed))

    taken = [cache.take(key, last=reader is readers[-1]) for reader in readers]
    outs = [reader(leaf) for reader, leaf in zip(readers, taken, strict=True)]
    return [lambda out=out, i=i: backward(out, seed + i) for i, out in enumerate(outs)]  # type: ignore[misc]


def test_the_gradients_of_later_chunks_come_back_with_the_values_own() -> None:
    """Two later chunks and the direct use: their sum, exactly; and nothing twice."""
    cache, made = HistoryCache(), values(1)
    cache.keep(KEY, made)
    direct = made.clone().requires_grad_()
    own = READERS[0](direct)
    for backward in reversed(run_later(cache, KEY, READERS[1:], seed=11)):
        backward()
    own.backward(values(10))
    assert direct.grad is not None
    total = cache.deliver(KEY, direct.grad)
    torch.testing.assert_close(total, gradient(READERS, made, 10), rtol=1e-15, atol=1e-15)
    cache.assert_empty()
    assert torch.equal(cache.deliver(KEY, direct.grad), direct.grad)


def test_sums_are_exact_where_the_numbers_are() -> None:
    """Integers in float64: no rounding, whatever the order."""
    cache, made = HistoryCache(), torch.arange(5.0, dtype=torch.float64)
    cache.keep(KEY, made)
    for factor, last in ((1000.0, False), (100.0, False), (10.0, True)):
        (cache.take(KEY, last=last) * factor).sum().backward()
    assert torch.equal(cache.deliver(KEY, torch.ones(5, dtype=torch.float64)), torch.full_like(made, 1111))


def test_a_reader_that_uses_a_value_several_times_counts_every_time() -> None:
    """Within one chunk autograd sums, and the leaf is collected once."""
    cache, made = HistoryCache(), values(1)
    cache.keep(KEY, made)
    leaf = cache.take(KEY, last=True)
    (leaf.sin() + leaf * 2).sum().backward()
    assert leaf.grad is None, "nothing stays on the leaf"
    assert torch.equal(cache.deliver(KEY, torch.zeros_like(made)), made.cos() + 2)


def test_a_value_whose_reader_has_no_use_for_it_gets_its_own_gradient() -> None:
    """A leaf that no loss depends on leaves nothing."""
    cache = HistoryCache()
    cache.keep(KEY, values(1))
    cache.take(KEY, last=True)
    grad = values(2)
    assert torch.equal(cache.deliver(KEY, grad), grad)
    cache.assert_empty()


def test_values_that_share_a_gradient_do_not_mix() -> None:
    """A sum's two terms get one tensor from autograd; what comes later for one of them is not for the other."""
    cache, grad, more = HistoryCache(), values(3), values(4)
    for name in ("a", "b"):
        cache.keep((0, name), values(1))
    one, other = cache.take((0, "a"), last=False), cache.take((0, "b"), last=False)
    (one + other).backward(grad)
    cache.take((0, "a"), last=True).backward(more)
    cache.take((0, "b"), last=True).backward(more * 2)
    zero = torch.zeros_like(grad)
    assert torch.equal(cache.deliver((0, "a"), zero), grad + more)
    assert torch.equal(cache.deliver((0, "b"), zero), grad + more * 2)


def test_microbatches_in_flight_do_not_mix() -> None:
    """Two of them with values of one name, backward in turns."""
    cache = HistoryCache()
    made = [values(1), values(2)]
    for microbatch in (0, 1):
        cache.keep((microbatch, "source.1"), made[microbatch])
    first, second = (run_later(cache, (m, "source.1"), READERS, seed=20 + 10 * m) for m in (0, 1))
    for one, other in zip(reversed(first), reversed(second), strict=True):
        other()
        one()
    zero = torch.zeros_like(made[0])
    for microbatch in (0, 1):
        expected = gradient(READERS, made[microbatch], 20 + 10 * microbatch)
        found = cache.deliver((microbatch, "source.1"), zero)
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=1e-15)
    cache.assert_empty()


def test_without_gradients_nothing_is_left() -> None:
    """An evaluation: the value itself is handed out and no sums are kept."""
    cache, made = HistoryCache(), values(1)
    with torch.no_grad():
        cache.keep(KEY, made)
        for last in (False, True):
            taken = cache.take(KEY, last=last)
            assert torch.equal(taken, made) and not taken.requires_grad
    assert not cache.pending
    cache.assert_empty()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradients_keep_the_dtype_of_the_message(dtype: torch.dtype) -> None:
    """They are summed in float32 or better and come out as they went in."""
    cache = HistoryCache()
    cache.keep(KEY, values(1, dtype))
    cache.take(KEY, last=True).sum().backward()
    assert cache.pending[KEY].dtype == torch.promote_types(dtype, torch.float32)
    assert cache.deliver(KEY, values(2, dtype)).dtype is dtype


@pytest.mark.parametrize("readers", [1, 3, 8, 30])
def test_bfloat16_gradients_are_rounded_once(readers: int) -> None:
    """Their sum is the nearest bfloat16 to the float64 sum, which adding them in bfloat16 is not."""
    count = 2000
    grads = [values(seed, torch.bfloat16, count) for seed in range(readers + 1)]
    cache = HistoryCache()
    cache.keep(KEY, values(99, torch.bfloat16, count))
    for number, grad in enumerate(grads[1:], 1):
        cache.take(KEY, last=number == readers).backward(grad)
    exact = sum(grad.double() for grad in grads)
    assert isinstance(exact, Tensor)
    chained = grads[-1]
    for grad in reversed(grads[:-1]):
        chained = chained + grad
    ours = (cache.deliver(KEY, grads[0]).double() - exact).abs()
    theirs = (chained.double() - exact).abs()
    half_a_step = (exact.to(torch.bfloat16).double() - exact).abs()
    noise = 1e-6 * sum(grad.double().abs() for grad in grads)  # of the sums in float32
    assert torch.all(ours <= half_a_step + noise)
    assert torch.all(ours <= theirs + noise)
    if readers > 1:
        assert ours.mean() < 0.8 * theirs.mean()
