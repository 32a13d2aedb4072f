"""Loss and every gradient of one process equal the naive float64 references, on random weights."""

from typing import Any

import pytest
import torch

from depthbench.config.schema import RunConfig
from tests.harness import run_workers
from tests.models import Pieces, Weights, assemble, assert_close, load_weights, pieces, reference_shape, small_run
from tests.models import start_stage as start
from tests.reference import random_weights, reference_loss

CASES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # architecture, our residual settings, the reference's options, model settings
    ("pre_ln", {}, {}, {}),
    ("pre_ln", {"norm_eps": 1e-3}, {"eps": 1e-3}, {"tie_embeddings": True, "rope_theta": 500.0}),
    ("pre_ln", {}, {}, {"num_kv_heads": 4, "head_dim": 10}),
    *[("block_attnres", {"sublayers_per_block": b}, {"sublayers_per_block": b}, {}) for b in (1, 2, 3, 4, 5, 8)],
    ("block_attnres", {"num_blocks": 3}, {"sublayers_per_block": 3}, {"hidden_size": 36, "head_dim": 8}),
    (
        "block_attnres",
        {"sublayers_per_block": 2, "key_norm_eps": 1e-2, "read_norm_eps": 1e-3, "norm_eps": 1e-1},
        {"sublayers_per_block": 2, "key_norm_eps": 1e-2, "norm_eps": 1e-3, "first_norm_eps": 1e-1},
        {"tie_embeddings": True},
    ),
    *[("hc", {"num_streams": n}, {"num_streams": n}, {}) for n in (1, 2, 4, 8)],
    ("hc", {"readout": "norm_then_sum"}, {"readout": "norm_then_sum"}, {}),
    ("hc", {"row_norm_eps": 1e-2, "norm_eps": 1e-3}, {"row_norm_eps": 1e-2, "eps": 1e-3}, {}),
    *[(name, {}, {}, {}) for name in ("sandwich_ln", "lns", "deepnorm", "keel")],
    *[(name, {"norm_eps": 1e-2}, {"eps": 1e-2}, {}) for name in ("sandwich_ln", "lns", "deepnorm", "keel")],
    *[("mhc", {"num_streams": n}, {"num_streams": n}, {}) for n in (1, 2, 4, 8)],
    ("mhc", {"readout": "sum_then_norm"}, {"readout": "sum_then_norm"}, {}),
    (
        "mhc",
        {"num_streams": 3, "sinkhorn_iterations": 3, "coefficient_eps": 1e-2, "norm_eps": 1e-3},
        {"num_streams": 3, "sinkhorn_iterations": 3, "coefficient_eps": 1e-2, "eps": 1e-3},
        {},
    ),
    ("moda", {}, {}, {}),
    ("moda", {"norm_eps": 1e-3}, {"eps": 1e-3}, {"num_kv_heads": 4, "num_layers": 3}),
    ("moda", {}, {}, {"num_layers": 1}),
]


def batch(run: RunConfig, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels [B, S] and a mask that leaves an uneven number of labels."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, run.model.vocab_size, (2, run.model.sequence_length + 1), generator=generator)
    mask = (torch.rand(2, run.model.sequence_length, generator=generator) < 0.7).double()
    return text[:, :-1], text[:, 1:], mask


def one_pass(rank: int, world_size: int, store: str, run: RunConfig, weights: Weights) -> tuple[float, Pieces]:
    stage = start(rank, world_size, store, run)
    load_weights(stage, weights)
    tokens, labels, mask = batch(run)
    loss = (stage(tokens, labels) * mask.T).sum()
    loss.backward()
    return float(loss.detach()), pieces(stage)


@pytest.mark.parametrize(("architecture", "residual", "options", "model"), CASES)
def test_loss_and_every_gradient(
    architecture: str, residual: dict[str, Any], options: dict[str, Any], model: dict[str, Any]
) -> None:
    run = small_run(architecture, residual, model=model)
    shape = reference_shape(run)
    weights = random_weights(shape, architecture, torch.Generator().manual_seed(1), **options)
    tokens, labels, mask = batch(run)
    expected, _ = reference_loss(weights, tokens, shape, architecture, labels, mask, **options)
    expected.backward()
    plain = {name: weight.detach() for name, weight in weights.items()}
    ((loss, found),) = run_workers(1, one_pass, run, plain)
    assert loss == pytest.approx(float(expected.detach()), rel=1e-11)
    gradients = {n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in weights.items()}
    assert_close(assemble([found]), gradients, 1e-9)
