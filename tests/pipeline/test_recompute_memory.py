"""With full recomputation a stage keeps, of each microbatch in flight, one live state a layer and its history once."""

from typing import Any

import pytest
from megatron.core.pipeline_parallel import schedules

from depthbench.config.schema import RunConfig
from depthbench.config.validate import layout_of, local_share, residual_of
from depthbench.pipeline.edges import edges, retentions
from depthbench.profiling.live_storages import LiveStorages
from depthbench.training.step import run_microbatches
from tests.harness import run_workers
from tests.models import small_run, start_model
from tests.parallel.test_layouts import microbatches

WIDTH, TOKENS, MICRO_BATCH, LAYERS, CHUNKS = 128, 64, 2, 8, 4
ELEMENT = 4  # bytes


def before_the_first_backward(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[int, list[int]]:
    """Bytes alive on this rank when its first backward pass begins, and the chunks that it has run by then."""
    model = start_model(rank, world_size, store, run)
    ran: list[int] = []
    for virtual, stage in enumerate(model.stages):
        stage.register_forward_pre_hook(lambda *_, chunk=virtual * world_size + rank: ran.append(chunk))
    batches = microbatches(run, 0, 0, 1)
    storages = LiveStorages()
    found: list[tuple[int, list[int]]] = []
    backward = schedules.backward_step

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append((storages.now, list(ran)))
        return backward(*args, **kwargs)

    schedules.backward_step = looked_at
    with storages:
        run_microbatches(model, batches, forward_only=False)
    return found[0]


def run_of(architecture: str, residual: dict[str, Any], cached: bool, recompute: str) -> RunConfig:
    model = {"num_layers": LAYERS, "hidden_size": WIDTH, "ffn_hidden_size": 3 * WIDTH, "sequence_length": TOKENS}
    return small_run(
        architecture,
        residual,
        model=model,
        train={"precision": "fp32", "micro_batch": MICRO_BATCH, "global_batch": 4 * MICRO_BATCH},
        parallel={"pipeline": 2, "virtual_pipeline": 2, "recompute": recompute},
        pipeline={"history_cache": cached},
    )


def kept_of_a_microbatch(run: RunConfig, chunk: int) -> int:
    """Bytes: the live state before each layer, and what history the last layer or a later chunk of the stage reads,
    but for what an earlier chunk of the stage has counted already."""
    residual, layout, local = residual_of(run), layout_of(run), local_share(run)
    first, last = layout.span(chunk)
    retention = retentions(residual, layout, run.pipeline.history_cache)[chunk]
    live = sum(local.numel(*residual.state_at(2 * layer).live) for layer in range(first, last))
    known = {spec.name: local.numel(spec) for spec in residual.state_at(2 * last).history}
    read = {spec.name for spec in residual.state_at(2 * (last - 1)).history}
    return ELEMENT * (live + sum(known[name] for name in (read | retention.kept) - set(retention.taken)))


def message(run: RunConfig, receiver: int) -> int:
    edge = edges(residual_of(run), layout_of(run), run.pipeline.history_cache)[receiver - 1]
    return ELEMENT * local_share(run).numel(*edge.tensors)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "resent"])
@pytest.mark.parametrize(
    ("architecture", "residual"),
    [
        ("pre_ln", {}),
        ("hc", {}),
        ("moda", {}),
        ("block_attnres", {"sublayers_per_block": 1}),
        ("block_attnres", {"sublayers_per_block": 4}),
        ("block_attnres", {"sublayers_per_block": 3}),
    ],
)
def test_one_live_state_a_layer(architecture: str, residual: dict[str, Any], cached: bool) -> None:
    run = run_of(architecture, residual, cached, "full")
    held, ran = run_workers(2, before_the_first_backward, run)[0]
    assert ran == [0, 0, 2, 2, 0], "this stage's warm-up, and the first pass after it"
    activations = sum(kept_of_a_microbatch(run, chunk) for chunk in ran)
    # chunk 0's last message, not sent yet; chunk 2's, whose buffer is kept until then; the gradient of chunk 2's first
    payloads = message(run, 1) + 2 * message(run, 3)
    state = ELEMENT * MICRO_BATCH * TOKENS * WIDTH
    assert held == pytest.approx(activations + payloads, abs=0.3 * state)
    everything, _ = run_workers(2, before_the_first_backward, run_of(architecture, residual, cached, "none"))[0]
    assert everything > 5 * activations, "nothing was recomputed"
