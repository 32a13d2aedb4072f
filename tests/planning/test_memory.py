"""What a plan says that a rank holds, against every tensor that was alive in a step."""

import gc
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.parallel import startup
from depthbench.planning.memory import CPU, CUDA, RankMemory, memory
from depthbench.planning.pipeline import cached_bytes
from depthbench.profiling.live_storages import LiveStorages
from depthbench.training.memory import held_bytes
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from tests.harness import run_workers
from tests.models import small_run, start_model
from tests.parallel.test_layouts import microbatches
from tests.residual.walk import SHIPPED, shipped

MODEL = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 512,
    "sequence_length": 64,
}
PP2, VP2 = {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "pp2": (2, PP2),
    "pp2_vp2": (2, VP2),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
    "dp2": (2, {}),
    "pp2_full": (2, {**PP2, "recompute": "full"}),
    "pp2_selective": (2, {**PP2, "recompute": "selective"}),
    "pp2_vocabulary": (2, PP2),
}
VOCABULARY = {"pp2_vocabulary": 4096}  # so large that the loss, not a block, sets the last stage's peak
EVERY = ("single", "pp2", "pp2_vp2", "tp2_sp", "pp2_full", "pp2_selective")
MEASURED: dict[str, dict[str, tuple[str, ...]]] = {
    "fp32": {
        **dict.fromkeys(("pre_ln", "block_attnres", "full_attnres", "hc", "moda"), EVERY),
        **dict.fromkeys(("sandwich_ln", "deepnorm"), ("single",)),
        "mhc": ("single", "pp2_full"),
        "keel": ("pp2_vp2",),
    },
    "bf16": {
        "pre_ln": ("dp2", "pp2_vocabulary"),
        "full_attnres": ("pp2_full",),
        "hc": ("pp2_vp2",),
        "moda": ("tp2_sp",),
    },
}
CASES = [(p, name, layout) for p, names in MEASURED.items() for name, layouts in names.items() for layout in layouts]


def run_of(name: str, layout: str, precision: str = "fp32", **train: Any) -> RunConfig:
    architecture, residual = shipped(name)
    if "num_blocks" in residual:
        residual = {**residual, "num_blocks": 4}  # of two sublayers
    return small_run(
        architecture,
        residual,
        model={**MODEL, "vocab_size": VOCABULARY.get(layout, MODEL["vocab_size"])},
        train={"precision": precision, "micro_batch": 2, "global_batch": 8, **train},
        parallel={"distributed_optimizer": True, **LAYOUTS[layout][1]},
    )


def plan_of(run: RunConfig, layout: str, kernels: Any = CPU) -> list[RankMemory]:
    return memory(run, LAYOUTS[layout][0], kernels)


@dataclass
class Measured:
    """Bytes: between steps; at most in a step; of the history cache."""

    held: int
    peak: int
    cache: int


def measure(rank: int, world_size: int, store: str, runs: list[RunConfig]) -> list[Measured]:
    """Of one step of each run, after one to warm up."""
    found = []
    for number, run in enumerate(runs):
        model = start_model(rank, world_size, f"{store}.{number}", run)
        optimizer = Optimizer(run, model)
        batches = microbatches(run, 0, model.context.dp_rank, model.context.dp_size)

        def step(model: Any = model, optimizer: Any = optimizer, batches: Any = batches) -> None:
            optimizer.zero_grad()
            run_microbatches(model, batches, forward_only=False)
            optimizer.apply(1e-4, optimizer.prepare())

        step()
        held = held_bytes(model, optimizer)
        with LiveStorages() as storages:
            step()
        cache = model.transport.cache.peak_bytes if model.transport else 0
        found.append(Measured(held, held + storages.peak, cache))
        del model, optimizer, step
        startup.stop()
        gc.collect()
    return found


@cache
def measured(precision: str, name: str, world_size: int) -> dict[str, list[Measured]]:
    """By layout, of each rank; all runs of a world are measured in the same processes, one after the other."""
    layouts = [layout for layout in MEASURED[precision][name] if LAYOUTS[layout][0] == world_size]
    ranks = run_workers(world_size, measure, [run_of(name, layout, precision) for layout in layouts])
    return {layout: [rank[number] for rank in ranks] for number, layout in enumerate(layouts)}


@pytest.mark.parametrize(("precision", "name", "layout"), CASES)
def test_the_plan_is_what_is_held(precision: str, name: str, layout: str) -> None:
    """On every rank weights, gradients and optimizer to a hundredth, the peak to a tenth, and what a step adds to them,
    which at this size is less than they are, at most a tenth below and three tenths above; the history cache to the
    byte."""
    run, world_size = run_of(name, layout, precision), LAYOUTS[layout][0]
    plan, stages = plan_of(run, layout), run.parallel.pipeline
    for rank, found in enumerate(measured(precision, name, world_size)[layout]):
        planned = plan[rank % stages]
        held = planned.weights + planned.gradients + planned.optimizer
        assert held == pytest.approx(found.held, rel=0.01)
        assert planned.peak == pytest.approx(found.peak, rel=0.1)
        added = found.peak - found.held
        assert 0.9 * added < planned.peak - held < 1.3 * added
        assert cached_bytes(run, world_size)[rank % stages] == found.cache


# -- the plan alone ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SHIPPED)
def test_history_cache(name: str) -> None:
    """A part of the activations, and the bytes of the cache itself; none where no stage runs twice."""
    run = run_of(name, "pp2_vp2")
    for rank, cached in zip(plan_of(run, "pp2_vp2"), cached_bytes(run, 2), strict=True):
        assert rank.history_cache == cached <= rank.activations
    for layout in ("single", "pp2"):
        assert all(rank.history_cache == 0 for rank in plan_of(run_of(name, layout), layout))


@pytest.mark.parametrize("name", SHIPPED)
def test_recomputation_takes_less_and_a_larger_microbatch_more(name: str) -> None:
    """What is kept is least with full recomputation, and in proportion to the tokens in any case."""
    for layout in ("pp2", "pp2_selective", "pp2_full"):
        one, two = (plan_of(run_of(name, layout, micro_batch=m, global_batch=4 * m), layout) for m in (2, 4))
        for small, large in zip(one, two, strict=True):
            assert large.activations == 2 * small.activations and large.messages == 2 * small.messages
            assert large.peak > small.peak and large.weights == small.weights
    kept = [[r.activations for r in plan_of(run_of(name, f"pp2{mode}"), "pp2")] for mode in ("", "_selective", "_full")]
    for none, selective, full in zip(*kept, strict=True):
        assert none > selective > full
    whole, part = (plan_of(run_of(name, layout), layout) for layout in ("pp2", "pp2_full"))
    assert all(b.peak < a.peak for a, b in zip(whole, part, strict=True))


def test_replicas_share_the_optimizer_and_nothing_else() -> None:
    """Of two, each has half; without the distributed optimizer all of it."""
    run = run_of("hc", "dp2", "bf16")
    (alone,), (shared,) = memory(run, 1, CUDA), memory(run, 2, CUDA)
    assert shared.optimizer == pytest.approx(alone.optimizer / 2, abs=12)
    assert (shared.weights, shared.gradients, shared.activations) == (alone.weights, alone.gradients, alone.activations)
    assert alone.gradients == 2 * alone.weights and alone.optimizer == 6 * alone.weights
    whole = replace(run, parallel=replace(run.parallel, distributed_optimizer=False))
    assert memory(whole, 2, CUDA)[0].optimizer == alone.optimizer


@pytest.mark.parametrize("name", SHIPPED)
def test_fused_norms_keep_no_copies(name: str) -> None:
    """Those of a CPU keep two in float32 where those of a GPU keep their input; the weights are the same."""
    for precision, input_bytes in (("fp32", 4), ("bf16", 2)):
        run = run_of(name, "single", precision)
        (cpu,), (cuda,) = plan_of(run, "single"), plan_of(run, "single", CUDA)
        assert (cpu.weights, cpu.gradients, cpu.optimizer) == (cuda.weights, cuda.gradients, cuda.optimizer)
        residual = residual_of(run)
        norms = sum(residual.kept(sublayer).norms for sublayer in range(residual.shape.num_sublayers))
        state = run.train.micro_batch * MODEL["sequence_length"] * MODEL["hidden_size"]
        assert cpu.activations - cuda.activations == norms * state * (2 * 4 - input_bytes)
