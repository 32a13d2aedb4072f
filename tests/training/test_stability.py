"""Training stays stable where it is known to be delicate: at the published learning rates, and deep with AttnRes."""

import math
from statistics import mean, median

import pytest

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from tests.harness import run_workers

from .test_precision import CHARACTER_MODEL, TEXT, train_on_english

LETTERS = [count / len(TEXT) for count in TEXT.bincount().tolist() if count]
ENTROPY = -sum(share * math.log(share) for share in LETTERS)  # the loss of who only knows how frequent each letter is


def recipe(name: str, **settings: object) -> RunConfig:
    """The shipped 400M recipe (its rates, warm-up, cosine, betas, decay, clipping) for a tiny model and few steps."""
    model = {f"model.{key}": value for key, value in CHARACTER_MODEL.items()}
    words = {"residual": name, "parallel": "single", "parallel.distributed_optimizer": "false", **model, **settings}
    return load_run("depthbench_400m", [f"{key}={value}" for key, value in words.items()])


@pytest.mark.parametrize(("name", "lr"), [("lns", 1e-2), ("deepnorm", 1e-3)])
def test_published_learning_rates(name: str, lr: float) -> None:
    """A hundred steps in bfloat16: the loss falls from the uniform distribution's to below the letters' entropy."""
    batch = {"train.global_batch": 8, "train.micro_batch": 8}
    run = recipe(name, **{"model.num_layers": 8, "train.steps": 100, **batch})
    optimizer = run.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (lr, 0.9, 0.95)
    assert (optimizer.warmup_fraction, optimizer.weight_decay, optimizer.clip_norm) == (0.1, 0.1, 1.0)
    ((losses, norms, _),) = run_workers(1, train_on_english, run)
    assert all(math.isfinite(value) for value in (*losses, *norms))
    assert losses[0] == pytest.approx(math.log(CHARACTER_MODEL["vocab_size"]), abs=0.1)
    assert max(losses) < losses[0] + 0.1
    assert mean(losses[-10:]) < ENTROPY < losses[0] - 1.5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attnres_in_32_layers(precision: str) -> None:
    """Eight blocks over 64 sublayers from scratch: the norm over all gradients is finite in each of fifty steps, the
    first included (so every gradient is), and falls; every read's query leaves zero.

    A single step may show a norm some times larger, with every architecture that has pre-norms: at a window's first
    token, which attends to itself alone, what is read stays as small as an embedding for some layers, and the gradient
    grows in each. Hence the median.
    """
    batch = {"train.global_batch": 4, "train.micro_batch": 4}
    narrow = {"model.hidden_size": 32, "model.ffn_hidden_size": 64}
    deep = {"model.num_layers": 32, "train.steps": 50, "train.precision": precision, **narrow, **batch}
    run = recipe("block_attnres", **deep)
    assert run.residual.num_blocks == 8
    ((losses, norms, weights),) = run_workers(1, train_on_english, run)
    assert all(math.isfinite(value) for value in (*losses, *norms))
    assert norms[0] < 10
    assert median(norms[-10:]) < norms[0]
    assert max(norms) < 100 * norms[0]
    assert max(losses) < losses[0] + 0.1
    assert mean(losses[-5:]) < losses[0] - 1
    queries = [values for name, (_, _, values) in weights.items() if name.endswith("query")]
    assert len(queries) == 64
    assert all(bool(query.any()) for query in queries)
