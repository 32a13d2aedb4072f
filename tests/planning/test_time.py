"""Predicted step times: what is counted, over which links it goes, and how a step adds up."""

import inspect
import json
from dataclasses import replace
from math import isclose
from typing import Any

import pytest
from megatron.core import parallel_state

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError
from depthbench.planning import flops
from depthbench.planning.cluster import Cluster, load_cluster
from depthbench.planning.exchange import stage_parameters
from depthbench.planning.links import Links
from depthbench.planning.parameters import count_parameters
from depthbench.planning.pipeline import edge_plans
from depthbench.planning.time import StepModel, StepTime, predict
from depthbench.planning.work import Work, chunk_work

ARCHITECTURES = ["pre_ln", "sandwich_ln", "deepnorm", "block_attnres", "full_attnres", "hc", "mhc", "moda"]


def run_of(*words: str) -> RunConfig:
    """All architectures with the same microbatch."""
    return load_run("depthbench_1600m", ["model=1600m_L40", "residual=block_attnres", "train.micro_batch=4", *words])


@pytest.fixture
def h100() -> Cluster:
    return load_cluster("h100")


def total(run: RunConfig) -> Work:
    """Forward, of all chunks."""
    return sum((chunk.forward for chunk in chunk_work(run)), Work())


# -- what is counted --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["single", "pp2", "pp4_vp2", "tp2_sp", "tp8_sp_pp4_vp2"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_chunks_flops_are_the_models(architecture: str, layout: str) -> None:
    """All chunks of all ranks together multiply what `forward_exact` counts, and twice that backward."""
    run = run_of(f"residual={architecture}", f"parallel={layout}")
    whole = run.train.micro_batch * flops.forward_exact(run, run.model.sequence_length) / run.parallel.tensor
    chunks = chunk_work(run)
    assert len(chunks) == run.parallel.pipeline * run.parallel.virtual_pipeline
    assert isclose(sum(chunk.forward.flops for chunk in chunks), whole)
    assert isclose(sum(chunk.backward.flops for chunk in chunks), 2 * whole)


def test_the_ends_and_uneven_chunks_cost_what_they_hold() -> None:
    """A chunk of two blocks computes twice one of one; the last one has the head as well."""
    run = run_of("parallel=pp4_vp2", "pipeline.blocks_per_chunk=[5,10,5,4,4,4,4,4]", "residual=pre_ln")
    flops_of = [chunk.forward.flops for chunk in chunk_work(run)]
    assert isclose(flops_of[1], 2 * flops_of[2])
    head = 2 * run.train.micro_batch * run.model.sequence_length * run.model.hidden_size * run.model.vocab_size
    assert isclose(flops_of[-1] - flops_of[-2], head)


def test_a_wider_state_moves_more() -> None:
    """Pre-LN reads and writes one hidden state a sublayer, HC four, AttnRes its sources."""
    moved = {name: total(run_of(f"residual={name}")).traffic for name in ARCHITECTURES}
    assert moved["pre_ln"] < moved["block_attnres"] < moved["full_attnres"]
    assert moved["pre_ln"] < moved["hc"]


def test_pre_ln_moves_what_its_description_says() -> None:
    """Five hidden states a sublayer: h twice in, h out, the branch in and out."""
    plain, other = (run_of(f"residual={name}", "parallel=single") for name in ("pre_ln", "hc"))
    tokens, width, layers = plain.train.micro_batch * 2048, plain.model.hidden_size, plain.model.num_layers
    streams = 4
    readouts = (2 + 2) - (2 * streams + 2)  # without a new state
    sublayers = 2 * layers * ((3 + 2) - (3 * streams + 2))
    assert isclose(total(plain).traffic - total(other).traffic, 2 * tokens * width * (sublayers + readouts))


@pytest.mark.parametrize(("mode", "flops_too"), [("none", None), ("selective", False), ("full", True)])
def test_recomputation(mode: str, flops_too: bool | None) -> None:
    """Full repeats the blocks' forward pass, selective what its matmuls do not keep; neither the head's."""
    (chunk,) = chunk_work(run_of(f"parallel.recompute={mode}"))
    if flops_too is None:
        assert chunk.recompute == Work()
        return
    assert 0 < chunk.recompute.traffic < chunk.forward.traffic
    assert (chunk.recompute.flops > 0) is flops_too and chunk.recompute.flops < chunk.forward.flops
    assert 0 < chunk.recompute.exchanged < chunk.forward.exchanged


def test_tensor_parallel_exchanges() -> None:
    """Four halves of an all-reduce a block, one each at the embedding and the head, (T - 1) / T of a microbatch."""
    for layout, calls in (("tp2_sp", 4 * 40 + 2), ("tp2", 2 * 40 + 1)):
        run = run_of(f"parallel={layout}")
        hidden = run.train.micro_batch * 2048 * 1728 * 2
        found = total(run)
        assert isclose(found.exchanged, (4 * 40 + 2) * hidden / 2), layout
        assert found.collectives == calls
    assert total(run_of("parallel=single")).collectives == total(run_of("parallel=single")).exchanged == 0


# -- which links ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "world", "near", "around"),
    [
        (["parallel.pipeline=4"], 4, True, True),  # four stages of one rank in a node
        (["parallel.pipeline=4"], 8, True, True),  # two replicas each
        (["parallel.pipeline=16"], 16, True, False),  # stages 7 and 8 are apart, and the ring's ends
        (["parallel.pipeline=4"], 32, False, False),  # data parallelism fills the nodes
        (["parallel=tp8_sp", "parallel.pipeline=2"], 16, False, False),
    ],
)
def test_stages_in_one_node_use_nvlink(h100: Cluster, words: list[str], world: int, near: bool, around: bool) -> None:
    """Ranks lie tensor-fastest, then data, then pipeline."""
    run = run_of("parallel=single", *words)
    links = Links(run, h100, world)
    assert (links.between(0, 1) == links.inside) is near
    assert (links.between(run.parallel.pipeline - 1, 0) == links.inside) is around


def test_stages_seven_and_eight_lie_on_two_nodes(h100: Cluster) -> None:
    links = Links(run_of("parallel=single", "parallel.pipeline=16"), h100, 16)
    assert links.between(7, 8) == links.between(8, 7) == links.outside
    assert links.between(8, 9) == links.inside


def test_the_order_of_ranks_is_megatrons() -> None:
    """The default of the installed Megatron-Core."""
    signature = inspect.signature(parallel_state.initialize_model_parallel)
    assert signature.parameters["order"].default == "tp-cp-ep-dp-pp"


def test_a_data_parallel_ring_uses_its_ranks_adapters(h100: Cluster) -> None:
    """Eight ranks of a group in a node share its eight adapters; a group's only rank there has one."""
    assert Links(run_of("parallel=single"), h100, 8).data == Links(run_of("parallel=single"), h100, 8).inside
    wide, narrow = (Links(run_of(f"parallel={layout}"), h100, 16).data for layout in ("single", "tp8_sp"))
    assert wide.rate == min(h100.nvlink, 8 * h100.network) and narrow.rate == h100.network


def test_messages_take_their_bytes_over_their_link(h100: Cluster) -> None:
    """In both directions; of equal size, since a gradient is as large as what it is the gradient of."""
    run = run_of("parallel=pp4_vp2")
    costs = StepModel(run, h100, 32).costs
    sizes = [edge.bytes for edge in edge_plans(run) if edge.direction == "forward"]
    assert list(costs.forward_edges) == [size / h100.network + 20e-6 for size in sizes]
    assert costs.backward_edges == costs.forward_edges


# -- a step -----------------------------------------------------------------------------------------------------------
def test_a_step_is_the_sum_of_its_parts(h100: Cluster) -> None:
    """And tokens, MFU and GPU-hours follow from it."""
    run = run_of("parallel=pp4_vp2")
    found = predict(run, h100, 64)
    assert isclose(found.step, found.forward_backward + found.gradients + found.update + found.gather)
    busy = found.matmul + found.memory + found.tensor + found.launch
    assert busy < found.forward_backward and found.recompute == 0
    assert isclose(found.tokens_per_second * found.step, 512 * 2048)
    assert isclose(found.mfu * 64 * 989e12, flops.train_per_token(run) * found.tokens_per_second)
    assert isclose(found.gpu_hours, found.step * 30400 * 64 / 3600)
    assert json.loads(json.dumps(found.as_dict()))["step"] == found.step
    assert any("matmuls reach 60%" in line for line in found.assumptions)


def test_one_stage_only_computes(h100: Cluster) -> None:
    """No bubble, no messages: the pass is what its parts take."""
    found = predict(run_of("parallel=single"), h100, 8)
    assert found.bubble == found.messages == found.tensor == 0
    assert isclose(found.forward_backward, found.matmul + found.memory + found.launch)


@pytest.mark.parametrize("device", ["a100-80gb", "h100"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_predictions_lie_in_the_fields_range(device: str, architecture: str) -> None:
    """MFU above nothing and below what matmuls alone reach."""
    cluster = load_cluster(device)
    found = predict(run_of(f"residual={architecture}"), cluster, 16)
    assert 0.02 < found.mfu < cluster.matmul_share


def slower(one: StepTime, other: StepTime) -> bool:
    return one.step > other.step


@pytest.mark.parametrize("field", ["peak_tflops", "hbm_gb_s", "nvlink_gb_s", "network_gb_s"])
def test_a_slower_machine_takes_longer(h100: Cluster, field: str) -> None:
    run = run_of("parallel=tp2_sp", "parallel.pipeline=4")
    half: dict[str, Any] = {field: getattr(h100, field) / 2}
    assert slower(predict(run, replace(h100, **half), 64), predict(run, h100, 64))


def test_settings_that_hide_or_repeat_work(h100: Cluster) -> None:
    def step(*words: str, world: int = 64) -> StepTime:
        return predict(run_of("parallel=single", *words), h100, world)

    overlap = "parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"
    assert slower(step(), step(*overlap))
    assert slower(step("parallel.distributed_optimizer=false"), step())
    assert slower(step("parallel.recompute=full"), step("parallel.recompute=selective"))
    assert slower(step("parallel.recompute=selective"), step())
    interleaved = "parallel.pipeline=4", "parallel.virtual_pipeline=2"
    assert slower(step("parallel.pipeline=4"), step(*interleaved, "pipeline.overlap_p2p=true"))
    assert slower(step(*interleaved), step(*interleaved, "pipeline.overlap_p2p=true"))
    one_gpu = step(world=1)
    assert one_gpu.gradients == one_gpu.gather == 0 < one_gpu.update


@pytest.mark.parametrize("layout", ["single", "tp2_sp", "pp4_vp2"])
def test_the_stages_hold_the_model(layout: str) -> None:
    """All ranks of a model copy together, but for roundings: each has all of the residual path's parameters of its
    blocks, and the tables are padded."""
    run = run_of(f"parallel={layout}")
    counted, ranks = count_parameters(run), run.parallel.tensor
    padding = 2 * (run.model.padded_vocab(ranks) - run.model.vocab_size) * run.model.hidden_size
    held = ranks * sum(stage_parameters(run))
    assert abs(held - counted.total - padding - (ranks - 1) * counted.residual) <= 2 * ranks * len(chunk_work(run))


def test_the_estimate_is_near_the_simulation(h100: Cluster) -> None:
    """Near enough to choose what to simulate."""
    for words in (["parallel=single"], ["parallel=pp4_vp2"], ["parallel=pp4_vp2", "pipeline.overlap_p2p=true"]):
        model = StepModel(run_of(*words), h100, 64)
        assert isclose(model.estimate(), model.predict().step, rel_tol=0.1), words


def test_a_layout_that_does_not_divide_is_refused(h100: Cluster) -> None:
    with pytest.raises(UserError, match=r"12 processes cannot hold parallel\.tensor=8"):
        predict(run_of("parallel=tp8_sp"), h100, 12)
