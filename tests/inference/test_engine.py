"""An engine's pages, its pieces, and what it refuses."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from depthbench.errors import UserError
from depthbench.inference.cache import CacheShape, LayerCache
from depthbench.inference.engine import Engine
from depthbench.inference.pieces import Piece, check_chunk, cut
from depthbench.model.build import build_stage
from depthbench.model.cached_attention import cached_attention, head_padding
from depthbench.model.depth_sdpa import flash_forward
from depthbench.parallel import startup
from depthbench.residual.protocol import DepthKV
from tests.harness import join_world, run_workers
from tests.models import small_run

from .reading import Shares


def test_pieces() -> None:
    assert cut(0, 10, 4, 1) == [Piece(0, 4, 0), Piece(4, 4, 0), Piece(8, 2, 0)]
    assert cut(5, 7, 3, 2) == [Piece(5, 3, 1), Piece(8, 3, 1), Piece(11, 1, 1)]
    assert cut(0, 8, 4, 4) == [Piece(0, 4, 0), Piece(4, 4, 0)]
    assert cut(3, 2, 64, 1) == [Piece(3, 2, 0)]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("page", [1, 3, 4, 11])
def test_pages_hold_what_was_written(page: int, padding: int) -> None:
    """And zeros after each head's."""
    cache = LayerCache(CacheShape(2, 2, 4, 11, page, padding), torch.float64, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 2, 11, 4, generator=generator, dtype=torch.float64)
    for start, stop in ((0, 5), (5, 6), (6, 10)):
        cache.write(start, keys[:, :, start:stop], values[:, :, start:stop])
        assert sum(page.shape[3] for page in cache.pages) == min(-(-stop // page) * page, 11)
        for end in range(stop + 1):
            pages = cache.before(end)
            if end:
                assert torch.equal(torch.cat([k for k, _ in pages], 2), F.pad(keys[:, :, :end], (0, padding)))
                assert torch.equal(torch.cat([v for _, v in pages], 2), F.pad(values[:, :, :end], (0, padding)))
            else:
                assert pages == []


@pytest.mark.parametrize("slots", [0, 2])
def test_padded_pages_are_attended_to_as_they_are(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of pages without zeros, and the kernel gets the pages themselves."""
    generator = torch.Generator().manual_seed(4)

    def drawn(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens, 6, generator=generator, dtype=torch.float64)

    q, k, v = drawn(4, 5), drawn(2, 5), drawn(2, 5)
    pages = [(drawn(2, tokens), drawn(2, tokens)) for tokens in (7, 3)]
    depth = DepthKV(*(tuple(drawn(2, 5) for _ in range(slots)) for _ in range(2))) if slots else None
    expected = cached_attention(q, k, v, pages, depth)
    padded = [(F.pad(keys, (0, 2)), F.pad(values, (0, 2))) for keys, values in pages]
    kernel = CountedKernel()
    monkeypatch.setattr("depthbench.model.cached_attention.flash_forward", kernel)
    found = cached_attention(q, k, v, padded, depth)
    assert found.shape == expected.shape and float((found - expected).abs().max()) < 1e-14
    assert kernel.keys[1:] == [page.data_ptr() for page, _ in padded]
    assert kernel.sizes[1:] == [8, 8], "queries of the pages' head dim, so that nothing is left to pad"


class CountedKernel:
    """Knows what it has attended to."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.sizes: list[int] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool = True) -> Any:
        self.keys.append(k.data_ptr())
        self.sizes.append(q.shape[-1])
        return flash_forward(q, k, v, scale, causal=causal)


def test_pages_are_padded_for_the_kernel_that_wants_it() -> None:
    """CUDA's, of half precisions."""
    assert [head_padding(76, 2, device) for device in ("cuda", "cpu")] == [4, 0]
    assert head_padding(76, 4, "cuda") == head_padding(128, 2, "cuda") == 0


def refusals(rank: int, world_size: int, store: str) -> dict[str, str]:
    join_world(rank, world_size, store)
    run = small_run("pre_ln", {}, parallel={"tensor": 2, "sequence": True, "distributed_optimizer": False})
    engine = Engine([build_stage(run, startup.start(run))], None, 1, 8)
    found = {}

    def refused(name: str, tokens: list[int], *arguments: Any) -> None:
        with pytest.raises(UserError) as caught:
            engine.read(torch.tensor([tokens], dtype=torch.long), *arguments)
        found[name] = str(caught.value)

    refused("empty", [])
    refused("long", [1] * 9)
    refused("id", [0, 150])
    refused("chunk", [1, 2, 3], 1)
    engine.read(torch.tensor([[1, 2, 3, 4, 5]]))
    refused("no room", [1, 2, 3, 4])
    engine.reset()
    assert engine.read(torch.tensor([[149] * 8]), 3) is not None
    return found


def test_refusals() -> None:
    found, other = run_workers(2, refusals)
    assert found == other
    assert "give at least one token" in found["empty"]
    assert "9 tokens do not fit a key-value cache of 8" in found["long"] and "1 more" in found["long"]
    assert "token id 150 is outside the vocabulary, 0 .. 149" in found["id"]
    assert "a chunk of 1 tokens cannot be shared by parallel.tensor=2 ranks" in found["chunk"]
    assert "9 tokens do not fit a key-value cache of 8" in found["no room"]


def of_two_engines(rank: int, world_size: int, store: str) -> tuple[list[tuple[set[int], bool]], str]:
    """Tokens of the depth state on this rank and whether they are the other one's too, where a second engine has the
    first one's stage; and what it refuses."""
    join_world(rank, world_size, store)
    run = small_run("pre_ln", {}, parallel={"tensor": 2, "sequence": True, "distributed_optimizer": False})
    stage = build_stage(run, startup.start(run))
    found = []
    for _ in range(2):
        engine = Engine([stage], None, 1, 8)
        seen = Shares(engine)
        for tokens in ([1, 2, 3, 4, 5], [6]):
            engine.read(torch.tensor([tokens]))
            replicated = seen.replicated()
            found.append((seen.take(), replicated))
    engine.reset()
    with pytest.raises(UserError) as refused:
        engine.read(torch.tensor([[1, 2, 3]]), 1)
    return found, str(refused.value)


def test_a_second_engine_shares_tokens_too() -> None:
    """After the first one has read one token, which all ranks hold."""
    for found, refused in run_workers(2, of_two_engines):
        assert found == [({3}, False), ({1}, True)] * 2
        assert "a chunk of 1 tokens cannot be shared" in refused


def test_chunks() -> None:
    check_chunk(2, 2)
    for chunk in (0, -3):
        with pytest.raises(UserError, match=r"give at least 2$"):
            check_chunk(chunk, 2)
