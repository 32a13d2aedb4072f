"""What a GPU has to prove, in one process or in several (`torchrun --nproc-per-node N`), on CUDA and NCCL where there
are any and on their stand-ins elsewhere.

    python -m tests.gpu.checks {single, layouts (two processes), pipelines (two or four)}

Prints a line `CHECK {"name": ..., "passed": ..., ...}` for each and exits with 1 if one failed.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from depthbench.config.schema import RunConfig
from depthbench.model.build import build_stages
from depthbench.model.depth_sdpa import joint_attention
from depthbench.model.recompute import Recompute
from depthbench.parallel import startup
from depthbench.pipeline.build import make_transport
from depthbench.planning.pipeline import edge_plans
from depthbench.training.step import run_microbatches
from depthbench.training.wrapped import WrappedModel, wrap
from tests.model import test_joint_attention as joint
from tests.models import ARCHITECTURES, assemble, assert_close, load_model, model_pieces, small_run
from tests.parallel.test_layouts import microbatches, reference_step, sample
from tests.residual import test_depth_attention as depth

Check = tuple[str, Callable[[], None]]


def model_of(run: RunConfig) -> WrappedModel:
    """Built as the trainer builds it, in a layout of its own."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    context = startup.start(run)
    transport = make_transport(run, context)
    stages = [stage.to(torch.cuda.current_device()) for stage in build_stages(run, context, transport)]
    return wrap(run, stages, transport)


# -- the whole model --------------------------------------------------------------------------------------------------
def parity(architecture: str, residual: dict[str, Any], options: dict[str, Any], **parallel: Any) -> None:
    """Loss and every gradient of a float64 step, through DDP, against the naive reference."""
    run = small_run(architecture, residual, parallel={"distributed_optimizer": False, **parallel})
    check_step(model_of(run), run, architecture, options)


def check_step(model: WrappedModel, run: RunConfig, architecture: str, options: dict[str, Any], steps: int = 1) -> None:
    """steps: how many times over; nothing of one may be left in the next."""
    weights, expected, mean, count = reference_step(run, architecture, options)
    load_model(model, weights)
    batches = microbatches(run, 0, model.context.dp_rank, model.context.dp_size)
    for _ in range(steps):
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        loss = run_microbatches(model, batches, forward_only=False)
        found = model_pieces(model, "main_grad")
        mine = {name: (place, size, value.cpu()) for name, (place, size, value) in found.items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        assert loss.tokens == count
        assert abs(loss.mean / mean - 1) < 1e-10, f"loss {loss.mean}, not {mean}"
        assert_close(assemble(ranks), expected, 1e-9)


# -- pipelines --------------------------------------------------------------------------------------------------------
def poison(stage: nn.Module, args: Any, out: Tensor) -> None:
    """Fills what the allocator hands out next with NaN, now and when the gradient comes: memory of a message that was
    given back too early is among it."""
    size = out.numel()

    def fill(*grad: Any) -> None:
        device = torch.cuda.current_device()
        held = [torch.full((size,), torch.nan, dtype=torch.float64, device=device) for _ in range(4)]
        del held

    fill()
    if out.requires_grad:
        out.register_hook(fill)


def pipeline(
    architecture: str, residual: dict[str, Any], options: dict[str, Any], microbatches: int, **sections: Any
) -> None:
    """Three steps in a row against the naive reference, with freed memory overwritten; headers are read unless the
    settings say otherwise (it makes the host wait for each message). What was sent is what was planned."""
    train = {"micro_batch": 2, "global_batch": 2 * microbatches}
    parallel = {"distributed_optimizer": False, **sections["parallel"]}
    settings = {"check_headers": True, "timeout": 60.0, **sections.get("pipeline", {})}
    run = small_run(architecture, residual, model={"num_layers": 8}, train=train, parallel=parallel, pipeline=settings)
    model = model_of(run)
    for stage in model.stages:
        stage.register_forward_hook(poison)
    check_step(model, run, architecture, options, steps=3)
    assert model.transport
    planned = {(e.sender, e.receiver): e.bytes * microbatches for e in edge_plans(run)}
    for (receiver, backward), traffic in model.transport.ledger.sent.items():
        edge = (receiver, receiver - 1) if backward else (receiver - 1, receiver)
        assert traffic.bytes == planned[edge], f"edge {edge}: {traffic.bytes} bytes sent, {planned[edge]} planned"


def recompute(architecture: str, residual: dict[str, Any], options: dict[str, Any]) -> None:
    """Bit-equal bfloat16 gradients, and less memory held. At 64 tokens CUDA's attention backward adds in one order."""
    run = small_run(architecture, residual, train={"precision": "bf16"}, model={"sequence_length": 64, "head_dim": 32})
    (stage,) = model_of(run).stages
    batch = sample(run, 0)
    tokens, labels = (batch[name].expand(2, -1).to(torch.cuda.current_device()) for name in ("tokens", "labels"))
    found: dict[Recompute, list[Tensor]] = {}
    held: dict[Recompute, int] = {}
    for mode in (Recompute.NONE, *Recompute):  # once more than needed: the first pass also allocates workspaces
        stage.recompute = mode
        stage.zero_grad()
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        losses = stage(tokens, labels)
        held[mode] = torch.cuda.memory_allocated() - before if torch.cuda.is_available() else 0
        losses.sum().backward()
        found[mode] = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
    for mode, gradients in found.items():
        plain = found[Recompute.NONE]
        assert all(map(torch.equal, gradients, plain)), f"{mode} changes gradients"
    if torch.cuda.is_available():
        assert held[Recompute.NONE] > held[Recompute.SELECTIVE] > held[Recompute.FULL], held


# -- the kernels ------------------------------------------------------------------------------------------------------
def on_device(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().to(torch.cuda.current_device()).requires_grad_() for tensor in tensors]


def joint_attention_kernel(dtype: torch.dtype, tolerance: float) -> None:
    """Against float64 on the CPU, at head sizes that are and are not multiples of eight."""
    for tokens, size, slots in ((70, 6, 5), (600, 64, 3), (300, 76, 47)):
        tensors = joint.leaves(tokens, size, slots, dtype)
        out, gradients = joint.run(joint_attention, on_device(tensors))
        expected, wanted = joint.run(joint.naive, [tensor.detach().double().requires_grad_() for tensor in tensors])
        for one, other in zip([out, *gradients], [expected, *wanted], strict=True):
            error = float((one.cpu().double() - other).abs().max() / other.abs().max())
            assert error < tolerance, f"{tokens} tokens, head size {size}: relative error {error:.1e}"


def depth_attention_kernel() -> None:
    """bfloat16 sources, one rounding of the result, against float64 on the CPU."""
    for count in (1, 2, 49):
        tensors = depth.leaves(count, width=300, dtype=torch.bfloat16)
        upstream = torch.randn(depth.S, depth.B, 300, generator=torch.Generator().manual_seed(9)).bfloat16()
        mixed, gradients = depth.gradients(depth.ours, on_device(tensors), upstream)
        wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
        expected, wanted = depth.gradients(depth.naive, wide, upstream)
        for one, other in zip([mixed, *gradients], [expected, *wanted], strict=True):
            rounding = 2**-8 if one.dtype is torch.bfloat16 else 0.0
            error = float(((one.cpu().double() - other).abs() - rounding * other.abs() * 1.01).max())
            assert error <= 3e-5 * max(float(other.abs().max()), 1.0), f"{count} sources: error {error:.1e}"


# -- the lists --------------------------------------------------------------------------------------------------------
def single() -> list[Check]:
    checks: list[Check] = []
    for case in ARCHITECTURES:
        checks.append((f"parity/{case[0]}", lambda case=case: parity(*case)))  # type: ignore[misc]
        checks.append((f"recompute/{case[0]}", lambda case=case: recompute(*case)))  # type: ignore[misc]
    checks.append(("joint_attention/bf16", lambda: joint_attention_kernel(torch.bfloat16, 2e-2)))
    checks.append(("joint_attention/fp64", lambda: joint_attention_kernel(torch.float64, 1e-10)))
    checks.append(("depth_attention/bf16", depth_attention_kernel))
    return checks


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2, "recompute": "selective"},
    "tp2_sp": {"tensor": 2, "sequence": True},
    "dp2": {"recompute": "full"},
}


def layouts() -> list[Check]:
    return [
        (f"{layout}/{case[0]}", lambda case=case, parallel=parallel: parity(*case, **parallel))  # type: ignore[misc]
        for layout, parallel in LAYOUTS.items()
        for case in ARCHITECTURES
    ]


# one live tensor, history, both, several streams: communicators of NCCL take seconds to make, for each of them anew
KINDS_OF_STATE = ("pre_ln", "block_attnres", "moda", "hc")
# processes, microbatches, settings
PIPELINES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 3, {"parallel": {"pipeline": 2}}),
    "pp2_vp2": (2, 4, {"parallel": {"pipeline": 2, "virtual_pipeline": 2}}),
    "pp2_vp2_overlap": (
        2,
        5,
        {
            "parallel": {"pipeline": 2, "virtual_pipeline": 2, "recompute": "full"},
            "pipeline": {"overlap_p2p": True, "microbatch_group": 3, "check_headers": False},
        },
    ),
    "pp4": (4, 6, {"parallel": {"pipeline": 4}}),
    "pp4_vp2_overlap": (
        4,
        8,
        {"parallel": {"pipeline": 4, "virtual_pipeline": 2}, "pipeline": {"overlap_p2p": True, "check_headers": False}},
    ),
    "pp2_vp2_tp2_sp": (4, 4, {"parallel": {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2, "sequence": True}}),
}


def pipelines() -> list[Check]:
    """Those for as many processes as there are here."""
    here = startup.world_from_environment()[1]
    return [
        (f"{name}/{case[0]}", partial(pipeline, *case, count, **settings))
        for name, (processes, count, settings) in PIPELINES.items()
        if processes == here
        for case in ARCHITECTURES
        if case[0] in KINDS_OF_STATE
    ]


LISTS = {"single": single, "layouts": layouts, "pipelines": pipelines}


def main(name: str) -> int:
    failed = 0
    for label, check in LISTS[name]():
        began, detail = time.perf_counter(), ""
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            detail = f"{type(error).__name__}: {error}".splitlines()[0]
            failed += 1
        if startup.world_from_environment()[0] == 0:
            seconds = round(time.perf_counter() - began, 2)
            line = {"name": label, "passed": not detail, "seconds": seconds, "detail": detail}
            print("CHECK " + json.dumps(line), flush=True)
    startup.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
