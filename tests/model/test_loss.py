"""Vocabulary-parallel cross entropy against torch's own in float64, with padding rows that would win if counted."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from depthbench.model.loss import vocab_parallel_cross_entropy
from depthbench.parallel import startup
from tests.harness import join_world, run_workers
from tests.models import small_run

S, B = 7, 3
ROWS = 128  # of a rank


def problem(vocab: int, world_size: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [S, B, padded vocabulary], labels that include the first and last id, and upstream gradients."""
    generator = torch.Generator().manual_seed(vocab)
    logits = scale * torch.randn(S, B, ROWS * world_size, generator=generator, dtype=torch.float64)
    logits[..., vocab:] = 10 * scale
    labels = torch.randint(0, vocab, (S, B), generator=generator)
    labels[0, 0], labels[0, 1] = 0, vocab - 1
    upstream = torch.randn(S, B, generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, upstream


def ours(
    rank: int, world_size: int, store: str, vocab: int, dtype: torch.dtype, scale: float
) -> tuple[Tensor, Tensor, bool]:
    join_world(rank, world_size, store)
    context = startup.start(small_run("pre_ln", parallel={"tensor": world_size, "distributed_optimizer": False}))
    logits, labels, upstream = problem(vocab, world_size, dtype, scale)
    shard = logits[..., ROWS * rank : ROWS * (rank + 1)].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(shard, labels, vocab, context)
    (grad,) = torch.autograd.grad(losses, shard, upstream.to(losses.dtype))
    return losses.detach(), grad, torch.equal(shard, logits[..., ROWS * rank : ROWS * (rank + 1)])


def exact(vocab: int, world_size: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """torch's own, in float64, of the same (rounded) logits without their padding."""
    logits, labels, upstream = problem(vocab, world_size, dtype, scale)
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide[..., :vocab].flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    (grad,) = torch.autograd.grad(losses, wide, upstream)
    return losses.detach(), grad


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "world_size"),
    [(128, 1), (101, 1), (256, 2), (150, 2), (129, 2), (101, 2)],  # the last: padding alone on rank 1
)
def test_against_torch(vocab: int, world_size: int, dtype: torch.dtype, scale: float) -> None:
    ranks = run_workers(world_size, ours, vocab, dtype, scale)
    losses, wanted = exact(vocab, world_size, dtype, scale)
    grad = torch.cat([found for _, found, _ in ranks], -1)
    inside = torch.promote_types(dtype, torch.float32)
    tolerance = 1e-12 if inside is torch.float64 else 2e-6
    for found, _, untouched in ranks:
        assert found.dtype is inside
        assert torch.equal(found, ranks[0][0])
        torch.testing.assert_close(found.double(), losses, rtol=tolerance, atol=tolerance * scale)
        assert untouched
    assert grad.dtype is dtype
    assert not grad[..., vocab:].any()
    rounding = 2**-8 if dtype is torch.bfloat16 else 0.0
    error = (grad.double() - wanted).abs() - rounding * wanted.abs()
    assert error.max() <= 10 * tolerance * max(1.0, scale / 100)
