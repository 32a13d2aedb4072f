"""What the rest of depthbench relies on, for every architecture that configs/residual/ ships."""

import ast
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import depthbench
from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.model.stage import DecoderStage, StageSpan
from depthbench.parallel.placement import apply_declarations, logical_shards, spec_of
from depthbench.paths import CONFIGS
from depthbench.planning.parameters import count_parameters
from depthbench.residual import Residual
from depthbench.residual.parameters import declare
from depthbench.residual.state import DepthState, Placement, TensorSpec
from tests.harness import run_workers
from tests.models import ARCHITECTURES, small_run, start_stage
from tests.parallel.test_layouts import sample

from .walk import SHIPPED, logits_from, run_sublayer, shipped, shipped_run, start

PACKAGE = Path(depthbench.__file__).parent


def test_every_registered_architecture_ships_a_file() -> None:
    assert {shipped(name)[0] for name in SHIPPED} == set(Residual.registry)


def test_every_registered_architecture_is_compared_under_every_layout() -> None:
    assert {name for name, *_ in ARCHITECTURES} == set(Residual.registry)


# -- declarations -----------------------------------------------------------------------------------------------------
def without_declarations(rank: int, world_size: int, store: str, run: RunConfig) -> dict[str, str]:
    """Parameter -> what applying declarations says when this one has lost its own."""
    stage = start_stage(rank, world_size, store, run)
    apply_declarations(stage, world_size)
    said = {}
    for name, parameter in stage.named_parameters():
        spec = spec_of(name, parameter)
        delattr(parameter, "spec")
        try:
            apply_declarations(stage, world_size)
        except AssertionError as error:
            said[name] = str(error)
        declare(parameter, spec)
    assert set(said) == {name for name, _ in stage.named_parameters()}
    return said


@pytest.mark.parametrize("name", SHIPPED)
def test_every_parameter_carries_a_declaration(name: str) -> None:
    (said,) = run_workers(1, without_declarations, shipped_run(name))
    assert all(f"parameter {parameter} declares no placement" in message for parameter, message in said.items())


# -- the state --------------------------------------------------------------------------------------------------------
Seen = dict[int, tuple[dict[str, Any], dict[str, Any]]]
"""Before sublayer k: (shape, dtype) by name, of live and of history tensors."""


def describe(state: DepthState) -> tuple[dict[str, Any], dict[str, Any]]:
    live, history = ({name: (tuple(t.shape), t.dtype) for name, t in part.items()} for part in state[:2])
    return live, history


def observe(rank: int, world_size: int, store: str, run: RunConfig) -> Seen:
    stage = start_stage(rank, world_size, store, run)
    batch = sample(run, 0)
    tokens, labels = (batch[name].expand(2, -1) for name in ("tokens", "labels"))
    seen = {0: describe(start(stage, tokens))}

    def observer(sublayer: int, state: DepthState) -> None:
        seen[sublayer + 1] = describe(state)

    stage.observer = observer
    stage(tokens, labels)
    return seen


def expected_state(run: RunConfig, sublayer: int) -> tuple[dict[str, Any], dict[str, Any]]:
    spec, parallel = residual_of(run).state_at(sublayer), run.parallel
    dtype = torch.float64 if run.train.precision.value == "fp64" else torch.bfloat16

    def local(tensor: TensorSpec) -> tuple[tuple[int, ...], torch.dtype]:
        tokens, shape = run.model.sequence_length, tensor.shape
        if tensor.placement is Placement.KV_HEADS:
            shape = (shape[0] // parallel.tensor, *shape[1:])
        elif parallel.sequence:
            tokens //= parallel.tensor
        return (tokens, 2, *shape), dtype

    return {t.name: local(t) for t in spec.live}, {t.name: local(t) for t in spec.history}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHIPPED)
def test_the_state_is_what_the_description_says(name: str, layout: str) -> None:
    """Names in depth order, shapes on this rank, dtype and kind, before each sublayer and before the readout."""
    world_size, parallel = LAYOUTS[layout]
    precision = "bf16" if layout == "one" else "fp64"
    parallel = {**parallel, "distributed_optimizer": False}
    run = shipped_run(name, parallel=parallel, train={"precision": precision})
    for seen in run_workers(world_size, observe, run):
        assert sorted(seen) == list(range(2 * run.model.num_layers + 1))
        for sublayer, found in seen.items():
            expected = expected_state(run, sublayer)
            assert found == expected, f"before sublayer {sublayer}"
            assert [list(part) for part in found] == [list(part) for part in expected], f"order before {sublayer}"


@pytest.mark.parametrize("b", [1, 3, 4, 7, 10])
def test_the_state_of_ragged_blocks(b: int) -> None:
    model = {"num_layers": 5}
    run = small_run("block_attnres", {"sublayers_per_block": b}, model=model)
    (seen,) = run_workers(1, observe, run)
    assert seen == {k: expected_state(run, k) for k in range(11)}


def unread(rank: int, world_size: int, store: str, run: RunConfig) -> list[str]:
    """State tensors that nothing after them reads: those with a zero gradient."""
    stage = start_stage(rank, world_size, store, run)
    state = start(stage, sample(run, 0)["tokens"].unsqueeze(0))
    useless = []
    for k in range(2 * run.model.num_layers + 1):
        live, history = ({n: t.detach().requires_grad_() for n, t in part.items()} for part in state[:2])
        state = DepthState(live, history)
        leaves = dict(chain(*(part.items() for part in state[:2])))
        logits_from(stage, k, state).square().sum().backward()
        useless += [f"{n} before sublayer {k}" for n, t in leaves.items() if t.grad is None or not t.grad.any()]
        if k < 2 * run.model.num_layers:
            state = run_sublayer(stage, k, state)
    return useless


@pytest.mark.parametrize("name", SHIPPED)
def test_the_state_holds_only_what_is_still_read(name: str) -> None:
    (useless,) = run_workers(1, unread, shipped_run(name))
    assert not useless


# -- the plan ---------------------------------------------------------------------------------------------------------
SHAPES = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


def built_on_meta(rank: int, world_size: int, store: str, runs: list[RunConfig]) -> list[int]:
    context = start_stage(rank, world_size, store, small_run("pre_ln", model={"num_layers": 1})).context
    counts = []
    for run in runs:
        layers = run.model.num_layers
        with torch.device("meta"):
            stage = DecoderStage(run.model, residual_of(run), StageSpan(0, layers, layers), context)
        assert all(parameter.is_meta for parameter in stage.parameters())
        shards = (s for name, p in stage.named_parameters() for s in logical_shards(name, p, 0, 1))
        counts.append(sum(torch.Size(shard.part.shape).numel() for shard in shards))
    return counts


@pytest.mark.parametrize("name", SHIPPED)
def test_the_planned_parameters_are_the_built_ones(name: str) -> None:
    runs = [load_run("depthbench_400m", [f"residual={name}", f"model={shape}"]) for shape in SHAPES]
    (counts,) = run_workers(1, built_on_meta, runs)
    assert counts == [count_parameters(run).total for run in runs]


# -- one file and one YAML --------------------------------------------------------------------------------------------
def named_in(tree: ast.AST, names: set[str], classes: set[str]) -> Iterator[str]:
    """Where code (not prose) names an architecture: its name as a whole string, a function or a variable; its class or
    its config class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Name | ast.Attribute | ast.FunctionDef):
            word = {ast.Name: "id", ast.Attribute: "attr", ast.FunctionDef: "name"}[type(node)]
            if (found := getattr(node, word)) in classes | names:
                yield f"line {node.lineno}: {found}"
        elif isinstance(node, ast.ImportFrom):
            words = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            yield from (f"line {node.lineno}: import of {word}" for word in sorted(words & (names | classes)))


def test_no_code_names_an_architecture_but_its_own_file() -> None:
    """Comments, docstrings and examples in help texts may. Architectures may share modules (MoDA is Pre-LN plus more),
    so imports between files of residual/ that take no architecture itself are fine. benchmarks/ choose theirs."""
    own = {Path(*cls.__module__.split(".")[1:]).with_suffix(".py"): cls for cls in Residual.registry.values()}
    found = []
    for path in sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "tools").rglob("*.py")]):
        relative = path.relative_to(PACKAGE.parent)
        itself = own.get(Path(*relative.parts[1:]))
        others = {cls for cls in Residual.registry.values() if cls is not itself}
        classes = {cls.__name__ for cls in others} | {cls.Config.__name__ for cls in others}
        names = {cls.name for cls in others} | {cls.__module__.rpartition(".")[2] for cls in others}
        names |= {name for name in SHIPPED if not itself or shipped(name)[0] != itself.name}
        for place in named_in(ast.parse(path.read_text()), names, classes):
            if not (itself and "import of" in place and place.rpartition(" ")[2] not in classes):
                found.append(f"{relative} {place}")
    assert not found
