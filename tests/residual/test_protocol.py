"""What the rest of depthbench relies on, for every architecture that configs/residual/ ships."""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import depthbench
from depthbench.cli import main
from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.model.stage import DecoderStage, StageSpan
from depthbench.parallel.placement import apply_declarations, logical_shards, spec_of
from depthbench.planning.parameters import count_parameters
from depthbench.residual import Residual
from depthbench.residual.hidden import HiddenReadout
from depthbench.residual.parameters import declare
from depthbench.residual.pre_ln import PreLNConnection
from depthbench.residual.protocol import Connection, Cost, Read
from depthbench.residual.state import DepthState, Placement, StateSpec, TensorSpec
from tests.harness import run_workers
from tests.models import assemble, assert_close, small_run, start_stage
from tests.parallel.test_layouts import sample, trained

from .walk import SHIPPED, logits_from, run_sublayer, shipped, start

PACKAGE = Path(depthbench.__file__).parent


def shipped_run(name: str, **sections: dict[str, Any]) -> RunConfig:
    """Five layers: ten sublayers make blocks of two where a file asks for eight of them."""
    architecture, settings = shipped(name)
    return small_run(architecture, settings, **{**sections, "model": {"num_layers": 5, **sections.get("model", {})}})


def test_every_registered_architecture_ships_a_file() -> None:
    assert {shipped(name)[0] for name in SHIPPED} == set(Residual.registry)


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
SHAPES = ("400m_L24", "200m_L12", "1600m_L28")


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
    """Where code (not prose) names an architecture: its name as a whole string, its class or its config class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in names:
            yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            if word in classes:
                yield f"line {node.lineno}: {word}"
        elif isinstance(node, ast.ImportFrom):
            words = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            yield from (f"line {node.lineno}: import of {word}" for word in sorted(words & (names | classes)))


def test_no_code_names_an_architecture_but_its_own_file() -> None:
    """Comments, docstrings and examples in help texts may. Architectures may share modules (MoDA is Pre-LN plus more),
    so imports between files of residual/ that take no architecture itself are fine."""
    own = {Path(*cls.__module__.split(".")[1:]).with_suffix(".py"): cls for cls in Residual.registry.values()}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        others = {cls for cls in Residual.registry.values() if cls is not own.get(relative)}
        classes = {cls.__name__ for cls in others} | {cls.Config.__name__ for cls in others}
        names = {cls.name for cls in others} | {cls.__module__.rpartition(".")[2] for cls in others}
        shared = relative in own
        for place in named_in(ast.parse(path.read_text()), names, classes):
            if not (shared and "import of" in place and place.rpartition(" ")[2] not in classes):
                found.append(f"{relative} {place}")
    assert not found


@dataclass(frozen=True)
class HalfConfig:
    factor: float = 0.5
    norm_eps: float = 1e-6


class HalfConnection(Connection):
    def __init__(self, width: int, cfg: HalfConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.plain, self.factor = PreLNConnection(width, cfg.norm_eps, dtype), cfg.factor

    def read(self, state: DepthState) -> Read:
        return self.plain.read(state)

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Any) -> DepthState:
        return DepthState({"h": state.live["h"] + self.factor * y}, {})


@pytest.fixture
def half_residual(tmp_path: Path) -> Iterator[str]:
    """An eleventh architecture: this class and a YAML, whose path is returned."""

    class Half(Residual, name="half"):
        Config = HalfConfig
        config: HalfConfig

        def start(self, embedding: Tensor) -> DepthState:
            return DepthState({"h": embedding}, {})

        def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
            return HalfConnection(self.shape.hidden_size, self.config, dtype)

        def readout(self, dtype: torch.dtype) -> nn.Module:
            return HiddenReadout(self.shape.hidden_size, self.config.norm_eps, dtype)

        def state_at(self, sublayer: int) -> StateSpec:
            return StateSpec((TensorSpec("h", (self.shape.hidden_size,)),), ())

        def num_parameters(self) -> int:
            return (self.shape.num_sublayers + 1) * self.shape.hidden_size

        def flops_per_token(self) -> Cost:
            return Cost(0, 0)

        def probe(self, state: DepthState) -> Tensor:
            return state.live["h"]

    file = tmp_path / "half_residual.yaml"
    file.write_text("# Half a residual.\narchitecture: half\nfactor: 0.25\n")
    yield str(file)
    del Residual.registry["half"]


SMALL = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "vocab_size": 150,
    "sequence_length": 16,
}


def test_an_eleventh_architecture_is_one_class_and_one_file(
    half_residual: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [f"residual={half_residual}", *(f"model.{name}={value}" for name, value in SMALL.items())]
    train = {"steps": 5, "global_batch": 4, "micro_batch": 2, "precision": "fp64"}
    words += [f"train.{name}={value}" for name, value in train.items()]
    words += ["parallel.distributed_optimizer=false", "optimizer.clip_norm=0"]
    alone = load_run("depthbench_400m", [*words, "parallel=single"])
    assert alone.residual == HalfConfig(factor=0.25)
    shared = load_run("depthbench_400m", [*words, "parallel=tp2_sp"])
    ((losses, _, found),) = run_workers(1, trained, alone)
    ranks = run_workers(2, trained, shared)
    assert len(set(losses)) == 5
    for other, _, _ in ranks:
        assert other == pytest.approx(losses, rel=1e-12)
    assert_close(assemble([pieces for *_, pieces in ranks]), assemble([found]), 1e-10)

    (counted,) = run_workers(1, built_on_meta, [alone])
    assert main(["plan", "depthbench_400m", *words, "parallel=single", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["architecture"] == "half"
    assert [plan["parameters"]["total"]] == counted


def test_the_eleventh_is_gone_again() -> None:
    assert "half" not in Residual.registry
