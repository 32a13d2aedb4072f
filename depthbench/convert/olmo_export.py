"""One of our checkpoints as a checkpoint of DepthBench's own code: one step's folder, without an optimizer's state."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthbench import __version__
from depthbench.checkpoint.stored import same_bits
from depthbench.checkpoint.streaming import Planned, write_tensors
from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError

from .export import tokenizer_of
from .importing import run_of
from .names import check, named_tensors
from .olmo import CONFIG, TENSORS, TOKENIZER, OlmoSource
from .olmo_config import SHAPE, in_effect, write_model
from .olmo_names import OlmoTensor, olmo_tensors
from .output import EXPORTED, check_out, new_folder, write_json
from .reading import PREFIX, Weights
from .tokenizer import write_tokenizer

VERSION = "2.5.0"  # of OLMo-core, whose layout this is


@dataclass(frozen=True)
class OlmoExport:
    """What was written."""

    folder: Path
    weights: Weights
    tensors: list[OlmoTensor]


def export_olmo(checkpoint: Path, out: Path, *, overwrite: bool = False, warn: Callable[[str], None]) -> OlmoExport:
    """Write the model in `checkpoint` (or the newest of a run folder) to the new folder `out`, in the stored types.

    Memory: one tensor at a time. The folder appears under its name when it is whole. warn: told of what does not stop
    the export.

    Raises UserError for a model that DepthBench's code does not have, an incomplete checkpoint, an `out` that is in the
    way, or a full disk.
    """
    weights = Weights(checkpoint)
    check_out(out, overwrite)
    run, residual = weights.run, residual_of(weights.run)
    if run.model.tie_embeddings:
        raise UserError("model.tie_embeddings=true: DepthBench's code has no tied head")
    stored = weights.dtypes.get("embedding.weight", torch.float32)
    section = write_model(run.model, residual, str(stored).removeprefix("torch."))
    check(weights, named_tensors(run.model, residual, stored, llama=False))
    assert residual.olmo is not None
    for name, values in residual.olmo.unsaid.items():
        warn(
            f"residual.{name}={getattr(residual.config, name)} is not written: revisions of DepthBench's code differ "
            f"in it ({', '.join(map(str, values))}); use one that computes it so"
        )
    tensors = olmo_tensors(run.model, residual, stored)
    planned = {PREFIX + t.name: t for t in tensors}
    tokenizer = tokenizer_of(weights, warn)

    def make(key: str) -> Tensor:
        tensor = planned[key]
        parts = [weights.read(p.logical, p.shape, weights.dtypes[p.logical]) for p in tensor.parts]
        return torch.cat(parts) if len(parts) > 1 else parts[0].reshape(tensor.shape)

    with new_folder(out, "export") as partial:
        types = (Planned(key, t.shape, weights.dtypes[t.parts[0].logical]) for key, t in planned.items())
        write_tensors(partial / TENSORS, types, make)
        if tokenizer:
            (partial / TOKENIZER).mkdir()
            if fault := write_tokenizer(partial / TOKENIZER, tokenizer, run.model.sequence_length):
                warn(fault)
        write_json(partial / CONFIG, {"model": section, "dataset": _dataset(run, tokenizer, out)})
        write_json(partial / ".metadata.json", {"version": VERSION})
        (partial / "README.md").write_text(
            f"{EXPORTED} {__version__} from step {weights.checkpoint.step} of the run `{run.name}`, in the layout of "
            "DepthBench's checkpoints.\n"
        )
    return OlmoExport(out, weights, tensors)


def _dataset(run: RunConfig, tokenizer: Tokenizer | None, out: Path) -> dict[str, Any]:
    """What DepthBench's analysis reads of this section: where the tokenizer is, and its ids."""
    section: dict[str, Any] = {"sequence_length": run.model.sequence_length}
    if tokenizer:
        section["tokenizer"] = {
            "vocab_size": tokenizer.vocab_size,
            "eos_token_id": tokenizer.eod,
            "pad_token_id": tokenizer.eod,
            "identifier": str(out.resolve() / TOKENIZER / "tokenizer.json"),
            "_CLASS_": "olmo_core.data.tokenizer.TokenizerConfig",
        }
    return section


def verify_olmo(done: OlmoExport) -> str | None:
    """Read what was written as an import does. Returns what differs from the checkpoint, if anything does."""
    weights, run = done.weights, done.weights.run
    residual = residual_of(run)
    assert residual.olmo is not None
    source = OlmoSource(done.folder, {name: getattr(run.residual, name) for name in residual.olmo.unsaid})
    theirs = residual_of(run_of(source, done.folder, torch.float32))
    here, there = run.model.in_effect(), source.model.in_effect()
    ours_and_theirs = {f"model.{name}": (here[name], there[name]) for name in (*SHAPE, "sequence_length")}
    for name in (*residual.olmo.settings, *residual.olmo.constants, *residual.olmo.eps):
        ours_and_theirs[f"residual.{name}"] = (in_effect(residual, name), in_effect(theirs, name))
    for name, (ours, read) in ours_and_theirs.items():
        if ours != read:
            return f"{name} is {ours}, and is read back as {read}"
    for part in (part for tensor in done.tensors for part in tensor.parts):
        values = weights.read(part.logical, part.shape, weights.dtypes[part.logical])
        if not same_bits(values, source.read(part.logical)):
            return f"{part.logical} is not read back as it was"
    return None
