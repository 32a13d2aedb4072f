"""Every layout computes the same model: loss, gradients, gradient norm, and weights and moments after several updates.

Batches have uneven numbers of valid tokens per microbatch and rank, so a loss averaged in the wrong place shows.
"""

import math
from typing import Any

import pytest
import torch

from depthbench.checkpoint.tensors import optimizer_tensors
from depthbench.config.schema import RunConfig
from depthbench.data.loader import Batch, SampleOrder
from depthbench.training.optimizer import Optimizer
from depthbench.training.schedule import learning_rate
from depthbench.training.step import run_microbatches
from depthbench.training.wrapped import WrappedModel
from tests.harness import run_workers
from tests.models import (
    ARCHITECTURES,
    Pieces,
    Weights,
    assemble,
    assert_close,
    load_model,
    model_pieces,
    reference_shape,
    small_run,
    start_model,
)
from tests.reference import random_weights, reference_loss
from tests.residual.walk import SHIPPED, shipped_run

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True, "recompute": "selective"}),
    "dp2": (2, {"recompute": "full"}),
    "tp2_dp2": (4, {"tensor": 2, "recompute": "selective", "overlap_grad_reduce": True, "bucket_size": 5000}),
    "tp2_sp_dp2": (4, {"tensor": 2, "sequence": True, "recompute": "full"}),
}


def sample(run: RunConfig, number: int) -> Batch:
    """Sample `number` of an endless stream; between one and all of its labels count."""
    generator = torch.Generator().manual_seed(number)
    length = run.model.sequence_length
    text = torch.randint(0, run.model.vocab_size, (length + 1,), generator=generator)
    valid = int(torch.randint(1, length + 1, (), generator=generator))
    return {"tokens": text[:-1], "labels": text[1:], "loss_mask": (torch.arange(length) < valid).float()}


def microbatches(run: RunConfig, step: int, dp_rank: int, dp_size: int) -> list[Batch]:
    size = run.train.global_batch
    order = SampleOrder(step * size, (step + 1) * size, run.train.micro_batch, dp_rank, dp_size)
    groups = [[sample(run, number) for number in numbers] for numbers in order]
    return [{name: torch.stack([s[name] for s in group]) for name in group[0]} for group in groups]


def gradients(
    rank: int, world_size: int, store: str, run: RunConfig, weights: Weights
) -> tuple[float, int, float, Pieces]:
    """Loss, tokens, gradient norm and gradients of one step."""
    model = start_model(rank, world_size, store, run)
    load_model(model, weights)
    optimizer = Optimizer(run, model)
    optimizer.zero_grad()
    batches = microbatches(run, 0, model.context.dp_rank, model.context.dp_size)
    loss = run_microbatches(model, batches, forward_only=False)
    found = model_pieces(model, "main_grad")
    return loss.mean, loss.tokens, optimizer.prepare(), found


def reference_step(run: RunConfig, architecture: str, options: dict[str, Any]) -> tuple[Weights, Weights, float, int]:
    """The naive reference's first step on random weights: those, their gradients, the mean loss and its tokens."""
    shape = reference_shape(run)
    weights = random_weights(shape, architecture, torch.Generator().manual_seed(2), **options)
    whole = [sample(run, number) for number in range(run.train.global_batch)]
    tokens, labels, mask = (torch.stack([s[name] for s in whole]) for name in ("tokens", "labels", "loss_mask"))
    total, count = reference_loss(weights, tokens, shape, architecture, labels, mask, **options)
    (total / count).backward()
    expected = {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in weights.items()}
    plain = {name: weight.detach() for name, weight in weights.items()}
    return plain, expected, float(total.detach()) / count, count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("architecture", "residual", "options"), ARCHITECTURES)
def test_gradients_in_float64(
    architecture: str, residual: dict[str, Any], options: dict[str, Any], layout: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    run = small_run(architecture, residual, parallel={"distributed_optimizer": False, **parallel})
    weights, expected, mean, count = reference_step(run, architecture, options)
    ranks = run_workers(world_size, gradients, run, weights)
    for loss, valid, _, _ in ranks:
        assert valid == count
        assert loss == pytest.approx(mean, rel=1e-10)
    assert_close(assemble([found for *_, found in ranks]), expected, 1e-10)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
    for _, _, found_norm, _ in ranks:
        assert found_norm == pytest.approx(norm, rel=1e-10)


def train_all(run: RunConfig, model: WrappedModel, optimizer: Optimizer) -> tuple[list[float], list[float]]:
    """All steps of a run; their losses and gradient norms."""
    losses, norms = [], []
    for step in range(run.train.steps):
        optimizer.zero_grad()
        batches = microbatches(run, step, model.context.dp_rank, model.context.dp_size)
        losses.append(run_microbatches(model, batches, forward_only=False).mean)
        norms.append(optimizer.prepare())
        optimizer.apply(learning_rate(step + 1, run.train.steps, run.optimizer), norms[-1])
    optimizer.weights_are_current()
    return losses, norms


def trained(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[list[float], list[float], Pieces]:
    """Losses and gradient norms of all steps, and the weights."""
    model = start_model(rank, world_size, store, run)
    return *train_all(run, model, Optimizer(run, model)), model_pieces(model, "data")


Trained = tuple[list[float], list[float], Pieces, list[Pieces]]


def trained_with_moments(rank: int, world_size: int, store: str, run: RunConfig) -> Trained:
    """Also the first moments, which are sums of gradients, in the pieces that this rank's optimizer keeps."""
    model = start_model(rank, world_size, store, run)
    optimizer = Optimizer(run, model)
    losses, norms = train_all(run, model, optimizer)
    moments: list[Pieces] = []
    for box in optimizer_tensors(optimizer):
        _, kind, name = box.key.split(".", 2)
        if kind == "exp_avg":
            place = tuple(slice(o, o + n) for o, n in zip(box.global_offset, box.local_shape, strict=True))
            moments.append({name: (place, box.global_shape, box.data.clone())})
    return losses, norms, model_pieces(model, "data"), moments


TRAINING: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "dp2_sharded": (2, {"distributed_optimizer": True}),
    "dp2_sharded_overlap": (
        2,
        {
            "distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "bucket_size": 5000,
        },
    ),
    "tp2_sp_dp2_sharded": (
        4,
        {"tensor": 2, "sequence": True, "distributed_optimizer": True, "bucket_size": 5000},
    ),
}


@pytest.mark.parametrize(("architecture", "residual", "options"), ARCHITECTURES)
def test_training_in_float32(architecture: str, residual: dict[str, Any], options: dict[str, Any]) -> None:
    """Five clipped AdamW updates: losses, norms, weights and what gradients left in the first moments are within 1e-5
    of one process in every layout."""
    train = {"precision": "fp32", "steps": 5}
    # Adam divides by the gradient's own size: with its usual eps, elements whose gradient is near zero turn float32
    # rounding into whole steps, in any implementation. The same test in float64 agrees to 1e-12 with eps 1e-8.
    optimizer = {"lr": 1e-3, "clip_norm": 1.0, "warmup_fraction": 0.2, "eps": 1e-4}
    alone = small_run(architecture, residual, train=train, optimizer=optimizer)
    ((losses, norms, found, moments),) = run_workers(1, trained_with_moments, alone)
    expected, expected_moments = assemble([found]), assemble(moments)
    assert losses[-1] < losses[0]
    for world_size, parallel in TRAINING.values():
        run = small_run(architecture, residual, train=train, optimizer=optimizer, parallel=parallel)
        ranks = run_workers(world_size, trained_with_moments, run)
        for other_losses, other_norms, _, _ in ranks:
            assert other_losses == pytest.approx(losses, rel=1e-5)
            assert other_norms == pytest.approx(norms, rel=1e-5)
        assert_close(assemble([found for _, _, found, _ in ranks]), expected, 1e-5)
        # a gradient of one element may be what is left of thousands of float32 terms (HC's scales): hence the floor
        found_moments = assemble([piece for *_, pieces in ranks for piece in pieces])
        assert_close(found_moments, expected_moments, 1e-5, floor=1e-3)


PLAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "dp2_overlap": (2, {"overlap_grad_reduce": True, "bucket_size": 5000}),
    "tp2_dp2": (4, {"tensor": 2}),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_training_in_float64(name: str) -> None:
    """Five AdamW updates with the usual eps and the plain optimizer: no layout changes more than the last digits."""
    optimizer = {"lr": 1e-3, "clip_norm": 0}
    ((losses, _, found),) = run_workers(1, trained, shipped_run(name, optimizer=optimizer))
    assert len(set(losses)) == 5
    for world_size, layout in PLAIN.values():
        run = shipped_run(name, optimizer=optimizer, parallel={**layout, "distributed_optimizer": False})
        ranks = run_workers(world_size, trained, run)
        assert ranks[0][0] == pytest.approx(losses, rel=1e-12)
        assert_close(assemble([found for *_, found in ranks]), assemble([found]), 1e-10)
