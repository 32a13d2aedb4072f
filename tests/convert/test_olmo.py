"""Checkpoints of DepthBench's own code, written by the documented names, read as ours."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from depthbench.convert.olmo import OlmoSource
from depthbench.residual import Residual
from tests.harness import run_workers
from tests.models import load_weights, reference_name, small_run, start_stage
from tests.reference import reference_logits
from tests.residual.walk import logits_from, start

from .olmo_checkpoints import PUBLISHED, SHAPE, drawn, their_config, their_tensors, write

TOKENS = torch.randint(SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))


def written(folder: Path, name: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None) -> Path:
    published = PUBLISHED[name]
    tensors = their_tensors(drawn(published), published.architecture)
    return write(folder, their_config(published), change(tensors) if change else tensors)


def _logits(rank: int, world_size: int, store: str, path: Path) -> Tensor:
    source = OlmoSource(path)
    model = {**asdict(source.model), "rope_scaling": None}
    run = small_run(source.architecture, asdict(source.residual), model=model)
    stage = start_stage(rank, world_size, store, run)
    load_weights(stage, {reference_name(name): source.read(name) for name in source.dtypes})
    with torch.no_grad():
        return logits_from(stage, 0, start(stage, TOKENS))[..., : SHAPE.vocab_size].transpose(0, 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_imported_model_computes_the_reference(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    path = written(tmp_path / "step7", name)
    (ours,) = run_workers(1, _logits, path)
    weights = drawn(published)
    expected = reference_logits(weights, TOKENS, SHAPE, published.architecture, **published.options)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    source = OlmoSource(path)
    assert source.architecture == published.architecture
    assert source.residual == Residual.registry[published.architecture].Config(**published.residual)
    assert (source.model.sequence_length, source.model.rope_theta) == (16, 10000.0)
    assert set(source.dtypes.values()) == {torch.float64}
    assert source.origin["step"] == 7
