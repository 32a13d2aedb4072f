"""Whether an export computes what its checkpoint does: both run on the same tokens, block by block.

The source is the trainer's own model (on one process), with the checkpoint's weights as the export stores them; the
export is loaded by transformers. Both compute in float32 (an export in float64: in float64).

Shapes: S tokens, B sequences, V vocabulary, D hidden.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthbench.config.schema import ParallelConfig, PipelineConfig, Precision, RunConfig
from depthbench.errors import UserError
from depthbench.model.build import build_stage
from depthbench.model.stage import DecoderStage
from depthbench.parallel import startup
from depthbench.parallel.placement import logical_shards

from .export import Export

TOLERANCE = 1e-4  # of the largest element: rounding stays below 1e-5, a wrong scale or constant is far above
SEQUENCES, TOKENS = 2, 128


@dataclass(frozen=True)
class Values:
    """logits: [B, S, V]. blocks: what each block leaves, [B, S, D] (residual streams: [B, S, N, D])."""

    logits: Tensor
    blocks: list[Tensor]


@dataclass(frozen=True)
class Comparison:
    """Largest differences, over the source's largest element: of the logits and of each block's output."""

    logits: float
    blocks: list[float]
    tokens: int

    @property
    def equal(self) -> bool:
        return self.logits <= TOLERANCE

    def describe(self) -> str:
        """One line: that they agree, or where they part."""
        if self.equal:
            return f"verified: logits at {self.tokens} positions agree to {self.logits:.1e} of the largest"
        wrong = next((i for i, error in enumerate(self.blocks) if not error <= TOLERANCE), None)
        if wrong is None:
            where = "every block agrees, so it is the final norm or the head"
        else:
            before = f" (the block before: {self.blocks[wrong - 1]:.1e})" if wrong else ", or the embedding before it"
            where = f"block {wrong} is the first that differs, by {self.blocks[wrong]:.1e} of its largest{before}"
        return f"the export does not compute what the checkpoint does: logits differ by {self.logits:.1e}; {where}"


def sample_tokens(run: RunConfig) -> Tensor:
    """[B, S] tokens, the same at each call."""
    length = min(TOKENS, run.model.sequence_length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(run.model.vocab_size, (SEQUENCES, length), generator=generator)


@torch.no_grad()
def source_values(done: Export, tokens_BS: Tensor) -> Values:
    """The trainer's model, on this process."""
    precision = Precision.FP64 if done.dtype is torch.float64 else Precision.FP32
    run = replace(
        done.weights.run,
        parallel=ParallelConfig(distributed_optimizer=False),
        pipeline=PipelineConfig(),
        train=replace(done.weights.run.train, precision=precision),
    )
    context = startup.start(run)
    try:
        stage = build_stage(run, context, draw=False)
        _fill(stage, done)
        state = stage.residual.start(stage.embed(tokens_BS))
        blocks = []
        for block in stage.blocks.values():
            state = block(state)
            blocks.append(stage.residual.probe(state).transpose(0, 1))
        return Values(stage.logits(state)[..., : run.model.vocab_size].transpose(0, 1), blocks)
    finally:
        startup.stop()


def _fill(stage: DecoderStage, done: Export) -> None:
    exported = {tensor.logical: tensor for tensor in done.tensors}
    for name, parameter in stage.named_parameters():
        for shard in logical_shards(name, parameter, 0, 1):
            tensor = exported[shard.name]
            parameter[shard.local] = done.weights.read(tensor.logical, tensor.shape, tensor.dtype)[shard.glob].to(
                parameter
            )


@torch.no_grad()
def export_values(folder: Path, remote_code: bool, dtype: torch.dtype, tokens_BS: Tensor) -> Values:
    """The export, as transformers loads it."""
    transformers = _transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=remote_code, dtype=dtype, local_files_only=True
    ).eval()
    blocks: list[Tensor] = []

    def left(layer: Any, given: Any, output: Any) -> None:
        if remote_code:
            output = model.model.residual.probe(output)
        blocks.append(output[0] if isinstance(output, tuple) else output)

    for layer in model.model.layers:
        layer.register_forward_hook(left)
    return Values(model(tokens_BS, use_cache=False).logits, blocks)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            'verification loads the export with transformers, which is missing: pip install "depthbench[convert]", '
            "or give --no-verify"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def verify(done: Export) -> Comparison:
    """Run both models. Nothing is changed or removed, whatever comes out."""
    tokens_BS = sample_tokens(done.weights.run)
    wide = torch.float64 if done.dtype is torch.float64 else torch.float32
    theirs = export_values(done.folder, done.remote_code, wide, tokens_BS)
    ours = source_values(done, tokens_BS)
    return Comparison(
        _error(theirs.logits, ours.logits),
        [_error(a, b) for a, b in zip(theirs.blocks, ours.blocks, strict=True)],
        tokens_BS.numel(),
    )


def _error(theirs: Tensor, ours: Tensor) -> float:
    """NaN where either has one."""
    return float((theirs - ours).abs().max() / ours.abs().max())
