"""Recomputing activations changes memory and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from depthbench.config.schema import RunConfig
from depthbench.model.build import build_stage
from depthbench.model.recompute import Recompute
from depthbench.parallel.context import ParallelContext
from tests.harness import run_workers
from tests.models import ARCHITECTURES, load_weights, reference_shape, small_run, start_stage
from tests.reference import random_weights

from .test_against_reference import batch


class _Storages(TorchDispatchMode):
    """Notes every storage that an operation makes, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive(self) -> int:
        return sum(size for reference, size in self.sizes.values() if not reference.expired())


@contextmanager
def storages() -> Iterator[_Storages]:
    with _Storages() as mode:
        yield mode


def passes(run: RunConfig, context: ParallelContext, mode: Recompute) -> tuple[int, list[torch.Tensor]]:
    """Bytes of activations that live between forward and backward, then the loss and every gradient."""
    stage = build_stage(replace(run, parallel=replace(run.parallel, recompute=mode)), context)
    shape = reference_shape(run)
    weights = random_weights(shape, run.architecture, torch.Generator().manual_seed(1), **OPTIONS[run.architecture])
    load_weights(stage, {name: weight.detach() for name, weight in weights.items()})
    tokens, labels, mask = batch(run)
    with storages() as made:
        loss = (stage(tokens, labels) * mask.T).sum()
        held = made.alive()
    loss.backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in stage.parameters()]
    return held, [loss.detach(), *gradients]


OPTIONS = {architecture: options for architecture, _, options in ARCHITECTURES}


def compare(rank: int, world_size: int, store: str, run: RunConfig, exact: bool) -> dict[str, int]:
    context = start_stage(rank, world_size, store, run).context
    found = {mode: passes(run, context, mode) for mode in Recompute}
    for one, other in zip(found[Recompute.SELECTIVE][1], found[Recompute.FULL][1], strict=True):
        assert torch.equal(one, other), "selective and full recomputation differ"
    for one, other in zip(found[Recompute.FULL][1], found[Recompute.NONE][1], strict=True):
        if exact:
            assert torch.equal(one, other), "recomputation changes a value"
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))
    assert all(bool(value.any()) for value in found[Recompute.NONE][1])
    return {mode.value: held for mode, (held, _) in found.items()}


@pytest.mark.parametrize(
    "parallel", [{"tensor": 1}, {"tensor": 2}, {"tensor": 2, "sequence": True}], ids=["one", "tp2", "tp2_sp"]
)
@pytest.mark.parametrize(("architecture", "residual", "options"), ARCHITECTURES)
def test_gradients_are_equal_and_memory_falls(
    architecture: str, residual: dict[str, Any], options: dict[str, Any], parallel: dict[str, Any]
) -> None:
    """Bit by bit; up to float32 rounding where depth reads share passes, which a checkpoint between them prevents."""
    parallel = {**parallel, "distributed_optimizer": False}
    run = small_run(architecture, residual, parallel=parallel, train={"precision": "fp32"})
    exact = architecture != "block_attnres"
    for held in run_workers(parallel["tensor"], compare, run, exact):
        # selective also keeps what each branch's last matmul made, which nobody keeps without recomputation
        assert held["none"] > 1.05 * held["selective"] > 1.05 * 1.1 * held["full"], held
