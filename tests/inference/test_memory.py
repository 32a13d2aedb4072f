"""What a rank holds while it reads, against the plan, and against the length of the text."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.parallel_state import get_global_memory_buffer

from depthbench.config.schema import RunConfig
from depthbench.inference.engine import Engine
from depthbench.inference.load import Loaded
from depthbench.inference.measure import Measured, measure
from depthbench.model import depth_sdpa
from depthbench.model.build import build_stage, build_stages
from depthbench.model.stage import DecoderStage
from depthbench.parallel import startup
from depthbench.pipeline.build import make_transport
from depthbench.pipeline.communicator import Communicator
from depthbench.planning.prefill import PrefillMemory, Reading, depth_state_bytes, prefill_memory
from depthbench.residual.state import DepthState
from tests.harness import join_world, run_workers
from tests.models import small_run
from tests.residual.walk import SHIPPED, shipped

MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
}
SHARED, STAGES = {"tensor": 2, "sequence": True}, {"pipeline": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2_sp": (2, SHARED),
    "pp2": (2, STAGES),
    "pp2_vp2": (2, {**STAGES, "virtual_pipeline": 2}),
    "pp2_tp2_sp": (4, {**STAGES, **SHARED}),
}
READINGS = [Reading(201, 201, 2), Reading(201, 50, 2, page=64, most_ahead=2)]


def run_of(name: str, parallel: dict[str, Any], precision: str = "fp32") -> RunConfig:
    architecture, residual = shipped(name)
    if "num_blocks" in residual:
        residual = {**residual, "num_blocks": 4}
    parallel = {"distributed_optimizer": False, **parallel}
    return small_run(architecture, residual, model=MODEL, parallel=parallel, train={"precision": precision})


def text(reading: Reading) -> torch.Tensor:
    shape = (reading.batch, reading.tokens)
    return torch.randint(0, MODEL["vocab_size"], shape, generator=torch.Generator().manual_seed(0))


def measured(
    rank: int, world_size: int, store: str, runs: list[RunConfig], readings: list[Reading]
) -> list[list[Measured]]:
    join_world(rank, world_size, store)
    context = startup.start(runs[0])
    found = []
    for run in runs:
        transport = make_transport(run, context)
        loaded = Loaded(run, build_stages(run, context, transport), transport)
        own = []
        for reading in readings:
            get_global_memory_buffer().buffer.clear()  # else only the first one makes it
            own.append(measure(loaded, text(reading), reading))
        found.append(own)
        del loaded, transport
        gc.collect()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_is_what_is_held(layout: str) -> None:
    """Keys and values, depth state and history cache to the byte; weights to a hundredth; the workspace to a tenth of
    itself on one rank, else to a fifth (gloo lets go of a buffer some time after its operation). Of interleaved stages
    the plan counts in both the state and the cache what they share: there the peak stays below 1.1 times its own."""
    world_size, parallel = LAYOUTS[layout]
    runs = [run_of(name, parallel) for name in SHIPPED]
    ranks = run_workers(world_size, measured, runs, READINGS)
    for number, name in enumerate(SHIPPED):
        for place, reading in enumerate(READINGS):
            found = ranks[0][number][place]
            assert len(found.ranks) == world_size and len({tuple(rank[number][place].next) for rank in ranks}) == 1
            for rank in found.ranks:
                plan, what = found.planned[rank.stage], (name, reading, rank.stage)
                assert rank.kv_cache == plan.kv_cache, what
                assert rank.depth_state == plan.depth_state, what
                assert rank.history_cache == plan.history_cache, what
                assert rank.weights == pytest.approx(plan.weights, rel=0.01), what
                if "virtual_pipeline" in parallel:
                    assert rank.peak <= 1.1 * plan.peak, what
                else:
                    assert rank.workspace == pytest.approx(plan.workspace, rel=0.1 if world_size == 1 else 0.2), what


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_many_narrow_sources(precision: str) -> None:
    """Where logits over depth, and attention's over depth slots, weigh as much as hidden states; grouped queries."""
    narrow = {**MODEL, "num_layers": 20, "hidden_size": 32, "ffn_hidden_size": 48}
    names = ("full_attnres", "moda")
    runs = [small_run(*shipped(name), model=narrow, train={"precision": precision}) for name in names]
    (found,) = run_workers(1, measured, runs, [Reading(65, 65), Reading(65, 40)])
    for name, readings in zip(names, found, strict=True):
        for each in readings:
            (rank,), (plan,) = each.ranks, each.planned
            assert rank.depth_state == plan.depth_state
            assert rank.workspace == pytest.approx(plan.workspace, rel=0.1), (name, each.reading)


@pytest.mark.parametrize("name", ["pre_ln", "moda"])
def test_scores_that_no_kernel_keeps_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA does in float32, planned for it, here on a CPU without its kernel."""
    monkeypatch.setattr(depth_sdpa, "_has_kernel", lambda q: False)
    run, readings = run_of(name, {}), [Reading(201, 201), Reading(201, 40), Reading(201, 40, page=64)]
    (found,) = run_workers(1, measured, [run], readings)
    for reading, each in zip(readings, found[0], strict=True):
        (rank,), (plan,) = each.ranks, prefill_memory(run, reading)
        assert rank.workspace == pytest.approx(plan.workspace, rel=0.1), reading
        assert plan.workspace > 1.5 * prefill_memory(run, reading, "cpu")[0].workspace


def test_padded_heads_are_planned_for_gpus() -> None:
    """Heads of 76 and 80, in pages of 80, in bfloat16 on CUDA; as they are on a CPU and in float32."""

    def kept(size: int, precision: str, device: str) -> int:
        model = {**MODEL, "head_dim": size}
        run = small_run("pre_ln", {}, model=model, train={"precision": precision})
        return prefill_memory(run, Reading(64, 16), device)[0].kv_cache

    elements = 2 * MODEL["num_layers"] * MODEL["num_kv_heads"] * 64
    assert kept(76, "bf16", "cuda") == kept(80, "bf16", "cuda") == 2 * elements * 80
    assert kept(76, "bf16", "cpu") == 2 * elements * 76
    assert kept(76, "fp32", "cuda") == 4 * elements * 76


def storages(rank: int, world_size: int, store: str, run: RunConfig, reading: Reading) -> int:
    """The most bytes of distinct storages under a state's tensors."""
    join_world(rank, world_size, store)
    stage = build_stage(run, startup.start(run))
    most = 0

    def count(sublayer: int, state: DepthState) -> None:
        nonlocal most
        tensors = (*state.live.values(), *state.history.values())
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        most = max(most, sum(held.values()))

    stage.observer = count
    Engine([stage], None, reading.batch, reading.tokens).read(text(reading), reading.chunk)
    return most


class Outlived:
    """Knows which of the depth state's tensors are still there."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []
        self.alive: list[int] = []

    def see(self, sublayer: int, state: DepthState) -> None:
        self.seen.extend(weakref.ref(tensor) for tensor in (*state.live.values(), *state.history.values()))

    def counted_before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*arguments: Any, **options: Any) -> Any:
            self.alive.append(sum(ref() is not None for ref in self.seen))
            return original(*arguments, **options)

        return replaced


def outlived(rank: int, world_size: int, store: str, runs: list[RunConfig]) -> list[tuple[int, list[int]]]:
    """Of each run: tensors of the depth state that this rank has had, and how many of them are still there whenever a
    message goes out or the head begins."""
    join_world(rank, world_size, store)
    context = startup.start(runs[0])
    found = []
    for run in runs:
        transport, watch = make_transport(run, context), Outlived()
        stages = build_stages(run, context, transport)
        for stage in stages:
            stage.observer = watch.see
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(DecoderStage, "project", watch.counted_before(DecoderStage.project))
            monkeypatch.setattr(Communicator, "send_forward", watch.counted_before(Communicator.send_forward))
            Engine(stages, transport, 2, 20).read(text(Reading(20, 8, 2)), 8)
        found.append((len(watch.seen), watch.alive))
    return found


@pytest.mark.parametrize("layout", ["single", "pp2"])
def test_sources_go_with_their_last_reader(layout: str) -> None:
    """Of three pieces: no tensor of the depth state is left when the head begins, or a stage's message goes out."""
    world_size, parallel = LAYOUTS[layout]
    runs = [run_of(name, parallel) for name in SHIPPED]
    for rank, found in enumerate(run_workers(world_size, outlived, runs)):
        last = rank == world_size - 1
        for name, (seen, alive) in zip(SHIPPED, found, strict=True):
            assert seen >= 3 * (2 * MODEL["num_layers"] // world_size + 1)
            assert alive == [0] * ((world_size > 1) * 3 + last), (name, rank)


@pytest.mark.parametrize("chunk", [201, 64])
def test_sources_are_shared_by_tokens(chunk: int) -> None:
    """Four blocks of two sublayers: the embedding and four sums, the last one running at first. Ranks hold
    5 x ceil(T / TP) x D x bytes of storage of the whole text, or of a chunk."""
    run, reading = run_of("block_attnres", SHARED), Reading(201, chunk)
    assert run.residual.num_blocks == 4
    sources, width, element = 5, MODEL["hidden_size"], 4
    expected = sources * -(-chunk // 2) * width * element
    assert run_workers(2, storages, run, reading) == [expected, expected]
    assert depth_state_bytes(run, reading, 0, MODEL["num_layers"]) == expected


def test_the_papers_figures() -> None:
    """8 blocks of width 7168 in bfloat16 over 131072 tokens: 15.03 GB; over 8 ranks 1.879; in chunks of 16K 0.235. The
    state has the embedding besides."""
    model = {"hidden_size": 7168, "num_attention_heads": 64, "num_layers": 8, "num_kv_heads": 8}
    for tensor, chunk, gigabytes in ((1, 131072, 15.03), (8, 131072, 1.879), (8, 16384, 0.235)):
        run = small_run(
            "block_attnres",
            {"num_blocks": 8},
            model={**MODEL, **model},
            parallel={"tensor": tensor, "sequence": True},
            train={"precision": "bf16"},
        )
        found = depth_state_bytes(run, Reading(131072, chunk), 0, 8)
        assert found * 8 / 9 / 1e9 == pytest.approx(gigabytes, abs=5e-4 * (10 if gigabytes > 10 else 1))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_costs_keys_and_values_alone(name: str) -> None:
    """On a GPU; in float32, for which it has no kernel, where pages bound the scores."""
    for precision, page in (("bf16", None), ("fp32", 512)):
        run = run_of(name, {}, precision)
        short, long = (prefill_memory(run, Reading(tokens, 512, page=page))[0] for tokens in (4096, 16384))
        assert long.peak - short.peak == long.kv_cache - short.kv_cache == 3 * short.kv_cache


def test_the_peak_grows_by_keys_and_values_alone() -> None:
    """At 4K and 16K tokens; what else grows is the text's own ids."""
    tiny = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "num_kv_heads": 1}
    run = small_run("block_attnres", {"num_blocks": 2}, model={**MODEL, **tiny}, train={"precision": "fp32"})
    (found,) = run_workers(1, measured, [run], [Reading(4096, 512), Reading(16384, 512)])
    short, long = (each.ranks[0] for each in found[0])
    assert long.kv_cache == 4 * short.kv_cache and long.depth_state == short.depth_state
    ids = 8 * (16384 - 4096)
    assert abs(long.workspace - short.workspace) <= 2 * ids


def test_kinds_add_up() -> None:
    assert PrefillMemory(0, 1, 2, 3, 4, 5).peak == 15
