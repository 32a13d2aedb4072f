"""Every architecture through every pipeline equals the naive reference on one process, and sends what the plan says.

The whole matrix has ten architectures, nine layouts, cache on and off, overlap on and off where there is interleaving,
and recomputation. `.ci/run` runs the rest of the matrix (`-m matrix`), every test run a selection: each architecture
with each layout once, the other settings dealt out so that all pairs meet.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest

from depthbench.config.schema import RunConfig
from depthbench.planning.pipeline import cached_bytes, edge_plans
from depthbench.training.optimizer import Optimizer
from depthbench.training.step import run_microbatches
from tests.harness import run_workers
from tests.models import (
    ARCHITECTURES,
    Pieces,
    Weights,
    assemble,
    assert_close,
    load_model,
    model_pieces,
    small_run,
    start_model,
)
from tests.parallel.test_layouts import microbatches, reference_step, trained


@dataclass(frozen=True)
class Layout:
    """count: microbatches of a step and data-parallel rank."""

    name: str
    parallel: dict[str, Any]
    pipeline: dict[str, Any]
    count: int

    @property
    def world_size(self) -> int:
        return int(self.parallel["pipeline"] * self.parallel.get("tensor", 1) * self.replicas)

    @property
    def replicas(self) -> int:
        return 2 if "dp2" in self.name else 1


matrix = [pytest.mark.matrix]
TP2, TP2_SP = {"tensor": 2}, {"tensor": 2, "sequence": True}
LAYOUTS = [
    Layout("pp2", {"pipeline": 2}, {}, 3),
    Layout("pp4", {"pipeline": 4}, {"blocks_per_chunk": [2, 3, 2, 1]}, 5),
    Layout("pp2_vp2", {"pipeline": 2, "virtual_pipeline": 2}, {}, 4),
    Layout("pp2_vp3", {"pipeline": 2, "virtual_pipeline": 3}, {"blocks_per_chunk": [1, 2, 1, 1, 2, 1]}, 2),
    Layout("pp4_vp2", {"pipeline": 4, "virtual_pipeline": 2}, {"microbatch_group": 5}, 5),
    Layout("pp2_tp2", {"pipeline": 2, **TP2}, {}, 2),
    Layout("pp2_tp2_sp", {"pipeline": 2, **TP2_SP}, {}, 3),
    Layout("pp2_vp2_dp2", {"pipeline": 2, "virtual_pipeline": 2}, {"microbatch_group": 3}, 5),
    Layout("pp2_vp2_tp2_sp", {"pipeline": 2, "virtual_pipeline": 2, **TP2_SP}, {}, 2),
]
EIGHT = [  # processes
    Layout("pp4_vp2_tp2_sp", {"pipeline": 4, "virtual_pipeline": 2, **TP2_SP}, {}, 4),
    Layout("pp2_vp2_tp2_sp_dp2", {"pipeline": 2, "virtual_pipeline": 2, **TP2_SP}, {}, 2),
]
EVERY_LAYOUT = [*LAYOUTS, *EIGHT]


@dataclass(frozen=True)
class Case:
    architecture: int
    layout: int
    cached: bool
    overlap: bool
    recompute: str

    def __str__(self) -> str:
        name, residual, _ = ARCHITECTURES[self.architecture]
        full = "full_attnres" if residual == {"sublayers_per_block": 1} else name
        settings = ("cached" if self.cached else "resent", "overlap" if self.overlap else "plain", self.recompute)
        return "-".join((full, EVERY_LAYOUT[self.layout].name, *settings))

    def run(self, **sections: Any) -> RunConfig:
        name, residual, _ = ARCHITECTURES[self.architecture]
        layout = EVERY_LAYOUT[self.layout]
        parallel = {"distributed_optimizer": False, "recompute": self.recompute, **layout.parallel}
        pipeline = {"history_cache": self.cached, "overlap_p2p": self.overlap, **layout.pipeline}
        train = {"micro_batch": 2, "global_batch": 2 * layout.count * layout.replicas}
        return small_run(
            name,
            residual,
            model={"num_layers": 8, **sections.pop("model", {})},
            parallel={**parallel, **sections.pop("parallel", {})},
            pipeline=pipeline,
            train={**train, **sections.pop("train", {})},
            **sections,
        )

    @property
    def everyday(self) -> bool:
        """Whether every test run has it: the settings follow a count that meets each of their eight combinations."""
        number = self.architecture + self.layout
        dealt = (number % 2 == 0, number // 2 % 2 == 0 and self.interleaved, ("none", "full")[number // 4 % 2])
        return (self.cached, self.overlap, self.recompute) == dealt

    @property
    def interleaved(self) -> bool:
        return "virtual_pipeline" in EVERY_LAYOUT[self.layout].parallel


def cases() -> list[Case]:
    every = product(range(len(ARCHITECTURES)), range(len(LAYOUTS)), (True, False), (True, False), ("none", "full"))
    return [case for case in (Case(*each) for each in every) if case.interleaved or not case.overlap]


def params(cases: list[Case], everyday: Callable[[Case], bool]) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=[] if everyday(case) else matrix) for case in cases]


Sent = dict[tuple[int, int], tuple[int, int, int, int]]
"""(sending chunk, receiving chunk) -> messages, tensors, bytes, bytes of headers."""


def ledger(model: Any) -> Sent:
    sent = {}
    for (receiver, backward), traffic in model.transport.ledger.sent.items():
        edge = (receiver, receiver - 1) if backward else (receiver - 1, receiver)
        sent[edge] = (traffic.messages, traffic.tensors, traffic.bytes, traffic.header_bytes)
    return sent


@dataclass
class Found:
    stage: int
    loss: float
    tokens: int
    norm: float
    gradients: Pieces
    sent: Sent
    peak: int
    evaluated: float
    evaluation_sent: Sent


def one_step(
    rank: int, world_size: int, store: str, run: RunConfig, weights: Weights, flags: dict[str, bool] | None = None
) -> Found:
    """flags: settings of Megatron-Core's that ours fix."""
    model = start_model(rank, world_size, store, run)
    for name, value in (flags or {}).items():
        setattr(model.context.megatron, name, value)
    load_model(model, weights)
    optimizer = Optimizer(run, model)
    optimizer.zero_grad()
    batches = microbatches(run, 0, model.context.dp_rank, model.context.dp_size)
    loss = run_microbatches(model, batches, forward_only=False)
    assert model.transport
    stage = model.transport.stage
    sent, peak = ledger(model), model.transport.cache.peak_bytes
    gradients = model_pieces(model, "main_grad")
    norm = optimizer.prepare()
    evaluated = run_microbatches(model, batches, forward_only=True)
    return Found(stage, loss.mean, loss.tokens, norm, gradients, sent, peak, evaluated.mean, ledger(model))


@cache
def reference(architecture: int, global_batch: int, tied: bool = False) -> tuple[Weights, Weights, float, int]:
    name, residual, options = ARCHITECTURES[architecture]
    model = {"num_layers": 8, "tie_embeddings": tied}
    run = small_run(name, residual, model=model, train={"micro_batch": 2, "global_batch": global_batch})
    return reference_step(run, name, options)


def check(case: Case, run: RunConfig, tied: bool = False, flags: dict[str, bool] | None = None) -> None:
    layout = EVERY_LAYOUT[case.layout]
    weights, expected, mean, count = reference(case.architecture, run.train.global_batch, tied)
    ranks = run_workers(layout.world_size, one_step, run, weights, flags)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in expected.values()))
    for found in ranks:
        assert found.tokens == count
        assert found.loss == pytest.approx(mean, rel=1e-10)
        assert found.evaluated == pytest.approx(mean, rel=1e-10)
        assert found.norm == pytest.approx(norm, rel=1e-10)
    assert_close(assemble([found.gradients for found in ranks]), expected, 1e-10)

    planned = {(edge.sender, edge.receiver): edge for edge in edge_plans(run)}
    caches = cached_bytes(run, layout.world_size)
    by_edge: dict[tuple[int, int], set[tuple[int, int, int, int]]] = {}
    for found in ranks:
        for edge, traffic in found.sent.items():
            by_edge.setdefault(edge, set()).add(traffic)
        forward = {edge: traffic for edge, traffic in found.sent.items() if edge[0] < edge[1]}
        assert found.evaluation_sent == forward
        assert found.peak == caches[found.stage]
    assert set(by_edge) == set(planned)
    for edge, traffics in by_edge.items():
        plan = planned[edge]
        tensors = plan.live_tensors + plan.history_tensors
        assert traffics == {(layout.count, layout.count * tensors, layout.count * plan.bytes, layout.count * 16)}


@pytest.mark.parametrize("case", params(cases(), lambda case: case.everyday))
def test_gradients_and_bytes(case: Case) -> None:
    """Loss, every gradient and their norm to 1e-10 in float64, evaluation too; one message an edge, microbatch and
    direction with the planned bytes; the cache's planned peak, and nothing left in it."""
    check(case, case.run())


@pytest.mark.parametrize(
    "case",
    [Case(6, 2, True, True, "selective"), Case(8, 0, True, False, "selective"), Case(9, 6, True, False, "selective")],
    ids=str,
)
def test_selective_recomputation(case: Case) -> None:
    """Of attention alone, a setting that the matrix does not have."""
    check(case, case.run())


@pytest.mark.parametrize("architecture", [0, 5])
@pytest.mark.parametrize(("overlap", "batch"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("deallocate", [False, True])
def test_settings_with_which_megatron_errs(architecture: int, overlap: bool, deallocate: bool, batch: bool) -> None:
    """Two stages of two chunks: with its own communicator Megatron-Core swaps messages where they are sent in batches,
    and (0.16, 0.17) frees what it still sends where communication overlaps."""
    case = Case(architecture, 2, True, overlap, "none")
    check(case, case.run(), flags={"deallocate_pipeline_outputs": deallocate, "batch_p2p_comm": batch})


def refused(rank: int, world_size: int, store: str, run: RunConfig, deallocate: bool) -> None:
    model = start_model(rank, world_size, store, run)
    model.context.megatron.deallocate_pipeline_outputs, model.context.megatron.batch_p2p_comm = deallocate, True
    with pytest.raises(ValueError, match="Can not use both overlap_p2p_comm and batch_p2p_comm"):
        run_microbatches(model, microbatches(run, 0, 0, 1), forward_only=False)


@pytest.mark.parametrize("deallocate", [False, True])
def test_megatron_refuses_to_overlap_batched_messages(deallocate: bool) -> None:
    """The combinations that the test before leaves out."""
    run_workers(2, refused, Case(0, 2, True, True, "none").run(), deallocate)


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        pytest.param(architecture, len(LAYOUTS) + number, marks=[] if (architecture, number) == (6, 0) else matrix)
        for architecture in (0, 6, 7, 9)
        for number in range(len(EIGHT))
    ],
)
def test_eight_processes(architecture: int, layout: int) -> None:
    case = Case(architecture, layout, True, True, "none")
    check(case, case.run())


@pytest.mark.parametrize("layout", [0, 2, 6])
def test_tied_embeddings(layout: int) -> None:
    """The weight is on the first and the last stage; its gradient is the sum of both, and counts once in the norm."""
    case = Case(1, layout, True, False, "none")
    check(case, case.run(model={"tie_embeddings": True}), tied=True)


TRAIN = {"precision": "fp32", "steps": 5}
OPTIMIZER = {"lr": 1e-3, "clip_norm": 1.0, "warmup_fraction": 0.2, "eps": 1e-4}  # eps: see parallel/test_layouts.py


@cache
def trained_alone(architecture: int, global_batch: int, tied: bool = False) -> tuple[list[float], list[float], Weights]:
    name, residual, _ = ARCHITECTURES[architecture]
    train = {**TRAIN, "micro_batch": 2, "global_batch": global_batch}
    model = {"num_layers": 8, "tie_embeddings": tied}
    run = small_run(name, residual, model=model, train=train, optimizer=OPTIMIZER)
    ((losses, norms, weights),) = run_workers(1, trained, run)
    return losses, norms, assemble([weights])


def check_training(case: Case, tied: bool = False) -> None:
    """Five clipped AdamW updates with the distributed optimizer and its overlaps: losses and norms within 1e-5 of one
    process, and the weights, by the norm of each. (Element by element a query, which starts at zero and so is nothing
    but updates, may differ by 1.3e-5 of its largest; one float32 process differs by half of that from float64.)"""
    overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}
    parallel = {"distributed_optimizer": True, **overlaps}
    run = case.run(model={"tie_embeddings": tied}, train=TRAIN, optimizer=OPTIMIZER, parallel=parallel)
    losses, norms, weights = trained_alone(case.architecture, run.train.global_batch, tied)
    ranks = run_workers(EVERY_LAYOUT[case.layout].world_size, trained, run)
    for other_losses, other_norms, _ in ranks:
        assert other_losses == pytest.approx(losses, rel=1e-5)
        assert other_norms == pytest.approx(norms, rel=1e-5)
    updated = assemble([found for *_, found in ranks])
    assert set(updated) == set(weights)
    for name, weight in weights.items():
        assert (updated[name] - weight).norm() <= 1e-5 * weight.norm(), name


def everyday_training(case: Case) -> bool:
    """Ten of the ninety: each architecture and each layout, and all eight combinations of the settings."""
    return (case.layout - 4 * case.architecture) % len(LAYOUTS) == 8


@pytest.mark.parametrize("case", params([case for case in cases() if case.everyday], everyday_training))
def test_training_in_float32(case: Case) -> None:
    """The pairwise selection of the matrix: each architecture with each layout once, the settings dealt out."""
    check_training(case)


def test_training_with_tied_embeddings() -> None:
    """The tied weight's master copies are divided over data-parallel ranks, on the first and on the last stage."""
    check_training(Case(1, 7, True, False, "none"), tied=True)
