"""A checkpoint holds logical tensors: saved under one layout and loaded under another, every element is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from depthbench.checkpoint.folder import latest
from depthbench.checkpoint.store import CheckpointWriter, load
from depthbench.checkpoint.tensors import model_tensors, optimizer_tensors, rectangles, set_updates_done, updates_done
from depthbench.config.schema import CheckpointConfig, RunConfig
from depthbench.errors import UserError
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from depthbench.training.wrapped import WrappedModel
from tests.harness import run_workers
from tests.models import small_run, start_model
from tests.parallel.test_layouts import microbatches

from .reading import differing, read_checkpoint


@pytest.mark.parametrize("shape", [(7,), (4, 6), (1, 5), (6, 1), (3, 4)])
def test_rectangles_tile_any_run(shape: tuple[int, ...]) -> None:
    elements = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(elements.numel()):
        for stop in range(start + 1, elements.numel() + 1):
            run = elements.view(-1)[start:stop]
            seen = torch.zeros_like(elements, dtype=torch.bool)
            boxes = list(rectangles(shape, start, stop))
            assert len(boxes) <= 3
            for box in boxes:
                place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                assert torch.equal(elements[place], run[box.begin : box.end].view(box.shape))
                assert not seen[place].any()
                seen[place] = True
            assert torch.equal(elements[seen], run)


def built(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[WrappedModel, Optimizer]:
    model = start_model(rank, world_size, store, run)
    return model, Optimizer(run, model)


def train_and_save(rank: int, world_size: int, store: str, run: RunConfig, folder: Path) -> int:
    """Two updates, then a checkpoint; returns how many buckets but the last of a gradient buffer are padded."""
    model, optimizer = built(rank, world_size, store, run)
    for step in range(2):
        optimizer.zero_grad()
        batches = microbatches(run, step, model.context.dp_rank, model.context.dp_size)
        run_microbatches(optimizer.model, batches, forward_only=False)
        optimizer.apply(1e-2, optimizer.prepare())
    optimizer.weights_are_current()
    save(model, optimizer, run, folder, 2)
    inner = [bucket for buffer in model.chunks[0].buffers for bucket in buffer.buckets[:-1]]
    return sum(bucket.grad_data.numel() != bucket.numel_unpadded for bucket in inner)


def save(model: WrappedModel, optimizer: Optimizer, run: RunConfig, folder: Path, step: int) -> None:
    writer = CheckpointWriter(folder, run.checkpoint, lambda text: None)
    tensors = [*model_tensors(model.stages), *optimizer_tensors(optimizer)]
    writer.save(step, tensors, {"step": step, "updates": updates_done(optimizer)})
    writer.close()


def load_and_save(rank: int, world_size: int, store: str, run: RunConfig, source: Path, target: Path) -> None:
    model, optimizer = built(rank, world_size, store, run)
    checkpoint = latest(source)
    assert checkpoint
    load(checkpoint, [*model_tensors(model.stages), *optimizer_tensors(optimizer)])
    set_updates_done(optimizer, checkpoint.manifest()["updates"])
    save(model, optimizer, run, target, 2)


# odd widths, and buckets small enough that there are several, padded to multiples of the ranks
OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"distributed_optimizer": False}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True, "distributed_optimizer": False}),
    "dp2_sharded": (2, {"distributed_optimizer": True}),
    "dp3_sharded_buckets": (3, {**OVERLAP, "bucket_size": 2000}),
    "tp2_dp2_sharded_buckets": (4, {**OVERLAP, "tensor": 2, "bucket_size": 1500}),
    "pp2_vp2_dp2_sharded": (4, {**OVERLAP, "pipeline": 2, "virtual_pipeline": 2}),
    "pp2_tp2_sp": (4, {"pipeline": 2, "tensor": 2, "sequence": True, "distributed_optimizer": False}),
}


MODEL = {"num_layers": 4, "hidden_size": 42, "ffn_hidden_size": 70, "head_dim": 6, "vocab_size": 139}


def run_for(layout: str, architecture: str, residual: dict[str, Any], precision: str) -> tuple[int, RunConfig]:
    world_size, parallel = LAYOUTS[layout]
    model = {**MODEL, "tie_embeddings": architecture == "moda"}
    train = {"precision": precision, "global_batch": 12, "micro_batch": 2}
    pipeline = {"microbatch_group": 3} if "virtual_pipeline" in parallel else {}
    return world_size, small_run(architecture, residual, parallel=parallel, pipeline=pipeline, model=model, train=train)


ATTNRES: tuple[str, dict[str, Any], str] = ("block_attnres", {"sublayers_per_block": 3}, "bf16")
HC: tuple[str, dict[str, Any], str] = ("hc", {}, "fp32")
MODA: tuple[str, dict[str, Any], str] = ("moda", {}, "bf16")


@pytest.mark.parametrize(
    ("source", "architecture", "residual", "precision"),
    [
        ("tp2_sp", *ATTNRES),
        ("dp3_sharded_buckets", *MODA),
        ("dp3_sharded_buckets", *HC),
        ("tp2_dp2_sharded_buckets", *HC),
        ("tp2_dp2_sharded_buckets", *ATTNRES),
        ("pp2_vp2_dp2_sharded", *ATTNRES),
        ("pp2_vp2_dp2_sharded", *MODA),
        ("pp2_tp2_sp", *MODA),
        ("pp2_tp2_sp", *HC),
    ],
)
def test_any_layout_to_any_layout(
    tmp_path: Path, source: str, architecture: str, residual: dict[str, Any], precision: str
) -> None:
    world_size, run = run_for(source, architecture, residual, precision)
    padded = run_workers(world_size, train_and_save, run, tmp_path / source)
    if run.parallel.bucket_size:
        assert min(padded) >= 1, "the buckets must be padded for this test to mean anything"
    saved = latest(tmp_path / source)
    assert saved
    tensors = read_checkpoint(saved.path)
    assert any(key.startswith("optimizer.exp_avg_sq.") for key in tensors)
    assert all(bool(tensor.any()) for key, tensor in tensors.items() if "exp_avg_sq.blocks" in key and ".q." in key)
    for target in ("one", "dp2_sharded", "tp2_dp2_sharded_buckets", "pp2_vp2_dp2_sharded", "pp2_tp2_sp"):
        world_size, other = run_for(target, architecture, residual, precision)
        run_workers(world_size, load_and_save, other, tmp_path / source, tmp_path / target)
        copied = latest(tmp_path / target)
        assert copied
        assert copied.manifest() == saved.manifest()
        assert not differing(read_checkpoint(copied.path), tensors)


def load_into(rank: int, world_size: int, store: str, run: RunConfig, source: Path) -> str:
    model, optimizer = built(rank, world_size, store, run)
    (stage,) = model.stages
    before = [parameter.detach().clone() for parameter in stage.parameters()]
    checkpoint = latest(source)
    assert checkpoint
    try:
        load(checkpoint, [*model_tensors(model.stages), *optimizer_tensors(optimizer)])
    except UserError as error:
        assert all(torch.equal(a, b) for a, b in zip(before, stage.parameters(), strict=True)), "partly loaded"
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("architecture", "residual", "model", "expected"),
    [
        ("pre_ln", {}, {}, "unexpected model.blocks.0.mlp_residual.depth_read"),
        ("block_attnres", {"sublayers_per_block": 3}, {"num_layers": 5}, "missing model.blocks.4."),
        (
            "block_attnres",
            {"sublayers_per_block": 3},
            {"vocab_size": 140},
            "model.embedding.weight has shape (139, 42)",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, architecture: str, residual: dict[str, Any], model: dict[str, Any], expected: str
) -> None:
    _, run = run_for("one", "block_attnres", {"sublayers_per_block": 3}, "fp32")
    run_workers(1, train_and_save, run, tmp_path)
    other = small_run(architecture, residual, model={**MODEL, **model}, train={"precision": "fp32"})
    for message in run_workers(2, load_into, other, tmp_path):
        assert expected in message


def save_many(rank: int, world_size: int, store: str, run: RunConfig, folder: Path, keep: int) -> list[str]:
    model, optimizer = built(rank, world_size, store, run)
    said: list[str] = []
    writer = CheckpointWriter(folder, CheckpointConfig(keep=keep), said.append)
    for step in (1, 2, 10):
        writer.save(step, [*model_tensors(model.stages), *optimizer_tensors(optimizer)], {"step": step})
        dist.barrier()
    return said


def test_retention_and_remnants(tmp_path: Path) -> None:
    """The newest complete ones are kept; what a killed save left is not taken for a checkpoint, and is removed."""
    _, run = run_for("one", "pre_ln", {}, "fp32")
    (tmp_path / "step_00000020").mkdir()  # no manifest: never published
    (tmp_path / "step_00000010").mkdir()
    (tmp_path / "step_00000010" / "half").touch()
    (tmp_path / ".saving-step_00000030").mkdir()
    said = run_workers(2, save_many, run, tmp_path, 2)
    found = latest(tmp_path)
    assert found
    assert found.step == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000010", "step_00000020"]
    assert [line.split()[2] for line in said[0]] == ["requested", "published"] * 3
