"""What a GPU has to prove, in one process or in two (`torchrun --nproc-per-node 2`), on CUDA and NCCL where there are
any and on their stand-ins elsewhere.

    python -m tests.gpu.checks {single, layouts}

Prints a line `CHECK {"name": ..., "passed": ..., ...}` for each and exits with 1 if one failed.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from depthbench.config.schema import RunConfig
from depthbench.model.build import build_stage
from depthbench.model.depth_sdpa import joint_attention
from depthbench.model.recompute import Recompute
from depthbench.model.stage import DecoderStage
from depthbench.parallel import startup
from depthbench.training.step import run_microbatches
from depthbench.training.wrapped import wrap
from tests.model import test_joint_attention as joint
from tests.models import ARCHITECTURES, assemble, assert_close, load_weights, pieces, small_run
from tests.parallel.test_layouts import microbatches, reference_step, sample
from tests.residual import test_depth_attention as depth

Check = tuple[str, Callable[[], None]]


def stage_of(run: RunConfig) -> DecoderStage:
    """Built as the trainer builds it, in a layout of its own."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return build_stage(run, startup.start(run)).to(torch.cuda.current_device())


# -- the whole model --------------------------------------------------------------------------------------------------
def parity(architecture: str, residual: dict[str, Any], options: dict[str, Any], **parallel: Any) -> None:
    """Loss and every gradient of a float64 step, through DDP, against the naive reference."""
    run = small_run(architecture, residual, parallel={"distributed_optimizer": False, **parallel})
    weights, expected, mean, count = reference_step(run, architecture, options)
    stage = stage_of(run)
    load_weights(stage, weights)
    ddp = wrap(run, [stage])
    ddp.chunks[0].zero_grad_buffer()
    batches = microbatches(run, 0, stage.context.dp_rank, stage.context.dp_size)
    loss = run_microbatches(ddp, batches, forward_only=False)
    mine = {name: (place, size, value.cpu()) for name, (place, size, value) in pieces(stage, "main_grad").items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    assert loss.tokens == count
    assert abs(loss.mean / mean - 1) < 1e-10, f"loss {loss.mean}, not {mean}"
    assert_close(assemble(ranks), expected, 1e-9)


def recompute(architecture: str, residual: dict[str, Any], options: dict[str, Any]) -> None:
    """Bit-equal bfloat16 gradients, and less memory held. At 64 tokens CUDA's attention backward adds in one order."""
    run = small_run(architecture, residual, train={"precision": "bf16"}, model={"sequence_length": 64, "head_dim": 32})
    stage = stage_of(run)
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


LISTS = {"single": single, "layouts": layouts}


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
