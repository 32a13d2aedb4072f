"""Guards before an update: non-finite losses and gradients stop the run, gradient spikes skip the step."""

from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from depthbench.config.schema import TrainConfig
from depthbench.data.loader import Batch
from depthbench.model.stage import DecoderStage
from depthbench.residual.state import DepthState


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
def first_bad_layer(stage: DecoderStage, microbatches: Sequence[Batch]) -> str:
    """Run the step's microbatches forward again and name the first place, over all ranks, whose output is not finite.

    Every rank must call it with as many microbatches.
    """
    head = 2 * stage.span.num_layers + 1
    worst = head + 1

    def observe(sublayer: int, state: DepthState) -> None:
        nonlocal worst
        if not bool(stage.residual.probe(state).isfinite().all()):
            worst = min(worst, sublayer + 1)

    device = torch.cuda.current_device()
    stage.observer = observe
    try:
        for batch in microbatches:
            tokens, labels = batch["tokens"].to(device), batch["labels"].to(device)
            if not bool(stage.embed(tokens).isfinite().all()):
                worst = 0
            if not bool(stage(tokens, labels).isfinite().all()):
                worst = min(worst, head)
    finally:
        stage.observer = None
    found = torch.tensor(worst, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return describe(int(found), stage.span.num_layers)


def first_bad_gradient(stage: DecoderStage) -> str:
    """Name the parameter, over all ranks, that forward uses last of those whose gradient is not finite: backward met
    it first. A collective call."""
    mine = [
        name
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
