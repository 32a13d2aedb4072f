"""Guards before an update: non-finite losses and gradients stop the run, gradient spikes skip the step."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from depthbench.config.schema import TrainConfig
from depthbench.data.loader import Batch
from depthbench.model.stage import DecoderStage
from depthbench.residual.state import DepthState

from .step import run_microbatches
from .wrapped import WrappedModel


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite. Raised on every rank, before the update: weights are unchanged."""


class SpikeGuard:
    """Says which updates to skip: those whose gradient norm exceeds a multiple of the recent median.

    Norms of skipped steps count too, so that a lasting change of level stops being a spike. All ranks see the same
    norms, so they decide alike. The norms seen belong to the checkpoint.
    """

    def __init__(self, config: TrainConfig, norms: Sequence[float] = ()) -> None:
        self.factor = config.spike_factor
        self.norms: deque[float] = deque(norms, maxlen=config.spike_window)

    def skips(self, grad_norm: float) -> bool:
        """Whether to skip the update. Never before a quarter of the window is known."""
        known = len(self.norms) * 4 >= (self.norms.maxlen or 1)
        spike = bool(self.factor) and known and grad_norm > self.factor * median(self.norms)
        self.norms.append(grad_norm)
        return spike


def describe(position: int, num_layers: int) -> str:
    if position == 0:
        return "the embedding"
    if position == 2 * num_layers + 1:
        return "the readout or the head"
    if position > 2 * num_layers:
        return "nothing: a replay of the same microbatches is finite; suspect the hardware"
    block, is_mlp = divmod(position - 1, 2)
    return f"block {block} ({'MLP' if is_mlp else 'attention'}, sublayer {position - 1})"


@torch.no_grad()
def first_bad_layer(model: WrappedModel, microbatches: Sequence[Batch]) -> str:
    """Run the step's microbatches forward again and name the first place, over all ranks, whose output is not finite.

    Every rank must call it with as many microbatches.
    """
    num_layers = model.stages[0].span.num_layers
    head = 2 * num_layers + 1
    worst = head + 1

    def observe(sublayer: int, state: DepthState) -> None:
        nonlocal worst
        if not bool(model.stages[0].residual.probe(state).isfinite().all()):
            worst = min(worst, sublayer + 1)

    for stage in model.stages:
        stage.observer = observe
    try:
        loss = run_microbatches(model, microbatches, forward_only=True)
    finally:
        for stage in model.stages:
            stage.observer = None
    if not math.isfinite(loss.total):
        worst = min(worst, head)
    found = torch.tensor(worst, device=torch.cuda.current_device())
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return describe(int(found), num_layers)


def first_bad_gradient(stages: Sequence[DecoderStage]) -> str:
    """Name the parameter, over all ranks, that forward uses last of those whose gradient is not finite: backward met
    it first. A collective call."""
    mine = [
        name
        for stage in stages
        for name, parameter in stage.named_parameters()
        if not bool(parameter.main_grad.isfinite().all())  # type: ignore[attr-defined]
    ]
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    bad = sorted({name for names in everyone for name in names}, key=_forward_position)
    return bad[-1] if bad else "no single parameter (their norm overflows)"


def _forward_position(name: str) -> tuple[int, int, str]:
    """Sorts parameter names in the order in which a forward pass uses them."""
    first, *rest = name.split(".")
    if first != "blocks":
        return (-1 if first == "embedding" else 10**6, 0, name)
    parts = ("attention_residual", "attention", "mlp_residual", "mlp")
    return (int(rest[0]), parts.index(rest[1]), name)
