"""Per-block statistics against plain hooks on the whole batch in one process, in every layout."""

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.config.schema import RunConfig
from depthbench.data.loader import Batch, SampleOrder
from depthbench.model.stage import DecoderStage
from depthbench.training.layer_stats import LayerStats
from depthbench.training.step import run_microbatches
from depthbench.training.wrapped import wrap
from tests.harness import run_workers
from tests.models import small_run, start_stage

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "recompute": (1, {"recompute": "full"}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
}
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [("block_attnres", {"sublayers_per_block": 3}), ("hc", {})]


def sample(run: RunConfig, number: int) -> Batch:
    """Random tokens; sample `number` has `number` labels less that count."""
    length = run.model.sequence_length
    text = torch.randint(run.model.vocab_size, (length + 1,), generator=torch.Generator().manual_seed(number))
    return {"tokens": text[:-1], "labels": text[1:], "loss_mask": (torch.arange(length) < length - number).double()}


def stacked(run: RunConfig, numbers: list[int]) -> Batch:
    samples = [sample(run, number) for number in numbers]
    return {name: torch.stack([s[name] for s in samples]) for name in samples[0]}


def stirred(stage: DecoderStage) -> DecoderStage:
    """Queries and mixing weights that start at zero would hide much: move every small parameter, alike everywhere."""
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if "residual" in name or "readout" in name:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return stage


def collected(rank: int, world_size: int, store: str, run: RunConfig) -> dict[str, float]:
    stage = stirred(start_stage(rank, world_size, store, run))
    ddp, context, size = wrap(run, [stage]), stage.context, run.train.global_batch
    order = SampleOrder(0, size, run.train.micro_batch, context.dp_rank, context.dp_size)
    batches = [stacked(run, numbers) for numbers in order]
    with LayerStats([stage]) as stats:
        loss = run_microbatches(ddp, batches, forward_only=False)
    found = stats.collect(loss.tokens)
    assert stage.block_hook is None
    before = stats.sums.clone()
    run_microbatches(ddp, batches, forward_only=False)  # outside: nothing is collected
    assert torch.equal(stats.sums, before)
    return found


def described(x: Tensor) -> dict[str, float]:
    return {
        "mean": float(x.mean()),
        "variance": float(x.var(unbiased=False)),
        "mean_abs": float(x.abs().mean()),
        "norm": float(x.square().sum(-1).mean().sqrt()),
    }


def naive(rank: int, world_size: int, store: str, run: RunConfig) -> dict[str, float]:
    stage = stirred(start_stage(rank, world_size, store, run))
    outputs: dict[int, Tensor] = {}

    def hook(block: Any, inputs: Any, state: Any) -> None:
        outputs[block.index] = stage.residual.probe(state)
        outputs[block.index].retain_grad()

    for block in stage.blocks.values():
        block.register_forward_hook(hook)
    batch = stacked(run, list(range(run.train.global_batch)))
    losses_SB = stage(batch["tokens"], batch["labels"])
    mask_SB = batch["loss_mask"].T
    ((losses_SB * mask_SB).sum() / mask_SB.sum()).backward()
    expected: dict[str, float] = {}
    for index, output in outputs.items():
        assert output.grad is not None
        for direction, x in (("forward", output.detach()), ("backward", output.grad)):
            for name, value in described(x).items():
                expected[f"layer_stats/block_{index:02d}/{direction}/{name}"] = value
    return expected


@pytest.mark.parametrize(("architecture", "residual"), ARCHITECTURES, ids=[name for name, _ in ARCHITECTURES])
def test_equal_to_plain_hooks_in_every_layout(architecture: str, residual: dict[str, Any]) -> None:
    (expected,) = run_workers(1, naive, small_run(architecture, residual))
    assert len(expected) == 4 * 2 * 4
    for layout, (world_size, parallel) in LAYOUTS.items():
        run = small_run(architecture, residual, parallel={"distributed_optimizer": False, **parallel})
        for found in run_workers(world_size, collected, run):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-15), (layout, name)
