"""A loss or gradient that is not finite ends the run on every rank before the update, and is traced to its layer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.checkpoint.folder import latest
from depthbench.config.schema import RunConfig
from depthbench.training.trainer import Trainer, train
from tests.corpora import Corpus, trainable_run
from tests.harness import defer_world, run_workers

STEP = 3
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2_sharded": (2, {"distributed_optimizer": True}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True, "distributed_optimizer": False}),
}


def poison_weight(trainer: Trainer, name: str) -> None:
    trainer.model.stages[0].get_parameter(name).data.view(-1)[0] = float("nan")


def poison_gradient(trainer: Trainer, name: str) -> None:
    def spoil(grad: Tensor) -> Tensor:
        return torch.full_like(grad, float("inf"))

    trainer.model.stages[0].get_parameter(name).register_hook(spoil)


def bits(trainer: Trainer) -> list[Tensor]:
    """Every weight, comparable even where it is nan."""
    return [p.detach().clone().view(torch.int32) for p in trainer.model.stages[0].parameters()]


def poisoned(
    rank: int, world_size: int, store: str, run: RunConfig, poison: Any, name: str
) -> tuple[int, bool, dict[str, Any]]:
    """Poison rank 1 before step STEP + 1; exit status, whether that step changed weights, and the status file."""
    defer_world(rank, world_size, store)
    update = Trainer._update
    seen: list[tuple[Trainer, list[Tensor]]] = []

    def tampered(self: Trainer, microbatches: list[Any]) -> dict[str, float]:
        if self.step == STEP:
            if rank == 1:
                poison(self, name)
            seen.append((self, bits(self)))
        return update(self, microbatches)

    Trainer._update = tampered  # type: ignore[method-assign]
    code = train(run)
    trainer, before = seen[0]
    changed = not all(torch.equal(a, b) for a, b in zip(before, bits(trainer), strict=True))
    return code, changed, json.loads((Path(run.folder) / "status.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("poison", "name", "expected"),
    [
        (
            poison_weight,
            "blocks.1.mlp.down.weight",
            "loss is nan; first non-finite output in block 1 (MLP, sublayer 3)",
        ),
        (poison_weight, "blocks.0.attention.out.weight", "first non-finite output in block 0 (attention, sublayer 0)"),
        (poison_weight, "readout.norm.weight", "first non-finite output in the readout or the head"),
        (poison_gradient, "blocks.1.mlp.gate_up.weight", "non-finite gradient in blocks.1.mlp.gate_up.weight"),
    ],
)
def test_the_first_bad_layer_is_named(
    corpus: Corpus, tmp_path: Path, layout: str, poison: Any, name: str, expected: str
) -> None:
    world_size, parallel = LAYOUTS[layout]
    run = trainable_run(corpus, tmp_path, parallel=parallel, train={"steps": 8}, checkpoint={"every": 2})
    for code, changed, status in run_workers(world_size, poisoned, run, poison, name):
        assert code == 3
        assert not changed, "the weights were updated"
        assert status["state"] == "failed"
        assert f"step {STEP + 1}: " in status["reason"]
        assert expected in status["reason"]
        assert "samples 12 to 15" in status["reason"]
    left = latest(tmp_path / "checkpoints")
    assert left and left.step == 2


def spiking(rank: int, world_size: int, store: str, run: RunConfig) -> None:
    """Train with the gradients of step 6 a hundred times too large."""
    defer_world(rank, world_size, store)
    update = Trainer._update

    def tampered(self: Trainer, microbatches: list[Any]) -> dict[str, float]:
        handles = []
        if self.step == 5:
            handles = [p.register_hook(lambda grad: grad * 100) for p in self.model.stages[0].parameters()]
            before = bits(self)
        values = update(self, microbatches)
        for handle in handles:
            handle.remove()
        if self.step == 5:
            assert all(torch.equal(a, b) for a, b in zip(before, bits(self), strict=True)), "a spike was applied"
        return values

    Trainer._update = tampered  # type: ignore[method-assign]
    assert train(run) == 0


def test_a_spike_is_skipped_and_counted(corpus: Corpus, tmp_path: Path) -> None:
    settings = {"steps": 8, "spike_factor": 5.0, "spike_window": 8}
    run = trainable_run(corpus, tmp_path, train=settings, parallel=LAYOUTS["dp2_sharded"][1])
    run_workers(2, spiking, run)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 0, 0, 0, 0, 1, 1, 1]
