"""Whether an export computes what its checkpoint does: both run on the same tokens, block by block.

The source is the trainer's own model (`trainers_model`), the export the one that transformers builds (`verify_export`).
Both compute in float32 (an export in float64: in float64), and neither is ever in memory as a whole.

A wrong eps or RoPE setting may change these logits too little to be seen, so config.json is also read as an import
reads it, and must give back the checkpoint's settings.

A deep model can amplify rounding until logits differ visibly. So where they do, each block of the export is run again
on what the source's block got, and judged by itself.

Shapes: S tokens, B sequences, V vocabulary, D hidden.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthbench.config.schema import RunConfig
from depthbench.residual.state import DepthState

from .export import Export
from .names import listed
from .trainers_model import Values, run_trainers_model
from .verify_export import load
from .verify_settings import settings_faults

TOLERANCE = 1e-4  # of the largest element: rounding stays below 1e-5, a wrong scale is far above
TOLERANCE_FLOAT64 = 1e-9
SEQUENCES, TOKENS = 2, 128


@dataclass(frozen=True)
class Comparison:
    """Differences over the source's largest element. logits: of models left alone. embedding, blocks, head: of each
    part, given what the source's part got (empty where logits agree). faults: of files that do not hold what the model
    expects, or of settings; the model was not run then."""

    tokens: int
    logits: float
    tolerance: float = TOLERANCE
    embedding: float = 0.0
    blocks: tuple[float, ...] = ()
    head: float = 0.0
    faults: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        parts = (self.embedding, *self.blocks, self.head)
        return self._small(self.logits) or (bool(self.blocks) and all(map(self._small, parts)))

    def _small(self, error: float) -> bool:
        return error <= self.tolerance  # NaN is not

    def describe(self) -> str:
        """One line: that they agree, or where they part."""
        if self.faults:
            return f"the export's files are not its model's: {listed(self.faults, 5)}"
        if self._small(self.logits):
            return f"verified: logits at {self.tokens} positions agree to {self.logits:.1e} of the largest"
        if self.equal:
            return (
                f"verified block by block: given the same, each agrees to {max(self.blocks):.1e} of its largest, the "
                f"head to {self.head:.1e}; left alone, the model amplifies rounding: logits differ by {self.logits:.1e}"
            )
        wrong = [number for number, error in enumerate(self.blocks) if not self._small(error)]
        if not self._small(self.embedding):
            where = f"the embedding differs, by {self.embedding:.1e} of its largest"
        elif wrong:
            others = (
                f", and so do {len(wrong) - 1} later ones" if len(wrong) > 1 else "; given the same, all others agree"
            )
            where = f"block {wrong[0]} is the first that differs, by {self.blocks[wrong[0]]:.1e} of its largest{others}"
        else:
            where = "every block agrees, so it is the final norm or the head"
        return f"the export does not compute what the checkpoint does: logits differ by {self.logits:.1e}; {where}"


def sample_tokens(run: RunConfig) -> Tensor:
    """[B, S] tokens, the same at each call."""
    length = min(TOKENS, run.model.sequence_length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(run.model.vocab_size, (SEQUENCES, length), generator=generator)


def _as(given: Any, state: DepthState) -> Any:
    """The source's state in the form in which the export's block gets its own."""
    if isinstance(given, Tensor):  # Llama's
        return state.live["h"].transpose(0, 1)
    live, history = ({k: v.transpose(0, 1).contiguous() for k, v in part.items()} for part in state[:2])
    return type(given)(live, history)


def _apart(state: Any, wanted: Any) -> float:
    """Of what a part left, and what the source's left: the difference of the tensor where it is largest; infinite where
    they are other tensors."""
    if isinstance(state, Tensor):
        return relative_error(state, wanted)
    ours, theirs = ({**each.live, **each.history} for each in (wanted, state))
    if {name: t.shape for name, t in ours.items()} != {name: t.shape for name, t in theirs.items()}:
        return math.inf  # no such depth state at all
    return max(
        (relative_error(theirs[name], ours[name]) for name in ours), key=lambda error: (math.isnan(error), error)
    )


@torch.no_grad()
def by_parts(model: Any, tokens_BS: Tensor, ours: Values) -> tuple[float, tuple[float, ...], float]:
    """Differences of the export's embedding, of each of its blocks, and of its readout and head together, where each
    gets what the source's got."""
    inner, llama = model.model, hasattr(model.model, "norm")
    embedding = 0.0
    blocks: list[float] = []

    def before(number: int) -> Any:
        def replaced(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal embedding
            wanted = _as(args[0], ours.states[number])
            if number == 0:
                embedding = _apart(args[0], wanted)
            return (wanted, *args[1:])

        return replaced

    def after(module: Any, args: Any, output: Any) -> None:
        left = output[0] if type(output) is tuple else output
        blocks.append(_apart(left, _as(left, ours.states[len(blocks) + 1])))

    for number, layer in enumerate(inner.layers):
        layer.register_forward_pre_hook(before(number))
        layer.register_forward_hook(after)
    (inner.norm if llama else inner.readout).register_forward_pre_hook(before(len(inner.layers)))
    logits = model(tokens_BS, use_cache=False).logits
    return embedding, tuple(blocks), relative_error(logits, ours.logits)


def verify(done: Export) -> Comparison:
    """Run both models. Nothing is changed or removed, whatever comes out."""
    tokens_BS = sample_tokens(done.weights.run)
    wide = done.dtype is torch.float64
    # transformers' own Llama has norms in float32 whatever the rest is
    tolerance = TOLERANCE_FLOAT64 if wide and done.remote_code else TOLERANCE
    dtype = torch.float64 if wide else torch.float32
    model, faults = load(done, dtype)
    faults += settings_faults(done)
    if faults:
        return Comparison(tokens_BS.numel(), float("nan"), tolerance, faults=tuple(faults))
    types = {tensor.logical: tensor.dtype for tensor in done.tensors}
    ours = run_trainers_model(
        done.weights.run, lambda name, shape: done.weights.read(name, shape, types[name]), tokens_BS, dtype
    )
    with torch.no_grad():
        logits = relative_error(model(tokens_BS, use_cache=False).logits, ours.logits)
    if logits <= tolerance:
        return Comparison(tokens_BS.numel(), logits, tolerance)
    return Comparison(tokens_BS.numel(), logits, tolerance, *by_parts(model, tokens_BS, ours))


def relative_error(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference over the largest element of ours; NaN where either has one; absolute where ours is zero."""
    return float((theirs - ours).abs().max() / (ours.abs().max() or 1.0))
