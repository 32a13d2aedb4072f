"""What architectures keep for backward: bytes of the distinct storages that autograd saves, parameters not counted.

`wide` are those with at least a number per token and channel; the rest is a few numbers a token and source or stream.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from depthbench.config.schema import RunConfig
from depthbench.residual import Shape, architecture
from depthbench.residual.depth_read import DepthRead
from depthbench.residual.state import DepthState
from tests.harness import run_workers
from tests.models import small_run, start_stage
from tests.parallel.test_layouts import sample

from .walk import shipped

WIDTH, TOKENS, MICRO_BATCH = 256, 32, 2
WIDE = TOKENS * MICRO_BATCH * WIDTH  # elements of one [S, B, D]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Saved(NamedTuple):
    total: int
    wide: int


def saved(function: Callable[[], Any], parameters: Iterable[Tensor]) -> Saved:
    kept: list[Tensor] = []  # keeps them alive, so that no two storages have one place
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        result = function()
    sizes = {t.untyped_storage().data_ptr(): (t.untyped_storage().nbytes(), t.element_size()) for t in kept}
    for parameter in parameters:
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    del result
    return Saved(
        sum(size for size, _ in sizes.values()), sum(size for size, each in sizes.values() if size >= WIDE * each)
    )


def run_of(name: str, precision: str, num_layers: int) -> RunConfig:
    model = {
        "num_layers": num_layers,
        "hidden_size": WIDTH,
        "ffn_hidden_size": 2 * WIDTH,
        "num_kv_heads": 4,
        "vocab_size": 128,
        "sequence_length": TOKENS,
    }
    return small_run(*shipped(name), model=model, train={"precision": precision})


def of_a_pass(rank: int, world_size: int, store: str, run: RunConfig, two_phases: bool) -> tuple[Saved, int]:
    """Kept by a forward pass, from the embedding to the loss; how many later reads something was attended ahead for."""
    stage = start_stage(rank, world_size, store, run)
    if not two_phases:
        for read in stage.modules():
            if isinstance(read, DepthRead):
                read.followers = []
    batch = sample(run, 0)
    tokens, labels = (batch[name].expand(MICRO_BATCH, -1) for name in ("tokens", "labels"))
    ahead: set[int] = set()
    stage.observer = lambda sublayer, state: ahead.update(state.ahead)
    return saved(lambda: stage(tokens, labels), stage.parameters()), len(ahead)


@pytest.mark.parametrize("two_phases", [True, False], ids=["shared", "direct"])
@pytest.mark.parametrize("precision", DTYPES)
def test_full_attnres_is_linear_in_depth(precision: str, two_phases: bool) -> None:
    """Four, eight and sixteen layers: doubling the layers that are added doubles what they keep (four times, were it
    quadratic). The two numbers a token that each read keeps of each source are quadratic, and under 3 % here."""
    found = [run_workers(1, of_a_pass, run_of("full_attnres", precision, n), two_phases)[0][0] for n in (4, 8, 16)]
    first, second = (b.total - a.total for a, b in pairwise(found))
    assert second / first == pytest.approx(2.0, abs=0.1)
    assert all(kept.total - kept.wide < 0.03 * kept.total for kept in found)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", ["block_attnres", "full_attnres"])
def test_two_phases_keep_no_mixtures(name: str, precision: str) -> None:
    """Reads that share a pass keep, beyond what direct ones do, at most their own output z, in the compute dtype. In
    float32 that adds nothing, since the norm that follows keeps z anyway (on a CPU the bfloat16 one keeps a float32
    copy instead). The mixtures themselves would be another float32 [S, B, D] a read."""
    run = run_of(name, precision, 12)
    (((shared, followers),), ((direct, none),)) = (run_workers(1, of_a_pass, run, two) for two in (True, False))
    assert followers >= 12 and none == 0
    reads = 2 * 12
    z = 0 if precision == "fp32" else WIDE * DTYPES[precision].itemsize
    assert shared.wide <= direct.wide + reads * z
    queries = reads * WIDTH * torch.float32.itemsize  # a stack of each group's
    assert shared.total <= direct.total + reads * z + queries


def of_a_connection(name: str, dtype: torch.dtype, tokens: int) -> tuple[int, int]:
    """Kept by a sublayer's read and write, the branch between them aside; by its norm alone."""
    cls = architecture(name)
    residual = cls(cls.Config(), Shape(2, WIDTH, 4, 4, WIDTH // 4))
    connection: Any = residual.connection(1, dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in connection.parameters():
            (part,) = parameter.spec.parts
            parameter.copy_(part.init(part.shape, generator))

    def draw() -> Tensor:
        return torch.randn(tokens, MICRO_BATCH, WIDTH, generator=generator).to(dtype).requires_grad_()

    state, y = residual.start(draw()), draw()

    def run() -> DepthState:
        read = connection(state)
        return connection.write(state, read, y, {})

    parameters, x = list(connection.parameters()), draw()
    return saved(run, parameters).total, saved(lambda: connection.norm(x), parameters).total


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", ["hc", "mhc"])
def test_streams_are_kept_once_a_sublayer(name: str, precision: str) -> None:
    """Beyond what its norm needs, a sublayer keeps for each token the four streams, once and in their own dtype, the
    branch's output, and coefficients: at most four sets of n (n + 2) in float32."""
    dtype, n = DTYPES[precision], 4
    (total, norm), (twice, twice_norm) = (of_a_connection(name, dtype, count) for count in (TOKENS, 2 * TOKENS))
    # of twice the tokens minus once: without what does not depend on them (float32 copies of bfloat16 weights)
    a_token = (twice - total - (twice_norm - norm)) / (TOKENS * MICRO_BATCH)
    coefficients = a_token - (n + 1) * WIDTH * dtype.itemsize
    assert 0 < coefficients <= 4 * n * (n + 2) * torch.float32.itemsize
