"""Activation recomputation of one block, through torch's non-reentrant checkpoint.

Non-reentrant, because a depth state is a structure of tensors (the reentrant form wants a flat list) and because a
replay then runs inside the backward of its own microbatch.
"""

import enum
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from depthbench.residual.state import DepthState

aten = torch.ops.aten

_KEPT = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


class Recompute(enum.Enum):
    """none: keep every activation. selective: keep what matmuls and attention produced, recompute norms, depth reads,
    RoPE and SwiGLU. full: keep a block's input state alone."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def _keep_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(block: Callable[..., DepthState], mode: Recompute) -> Callable[..., DepthState]:
    """`block`, run so that backward recomputes what `mode` says. There is no dropout, so no random state to restore."""
    if mode is Recompute.NONE or not torch.is_grad_enabled():
        return block
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode is Recompute.SELECTIVE:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matmuls)
    return partial(checkpoint, block, **options)
