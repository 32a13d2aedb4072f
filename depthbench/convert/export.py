"""One checkpoint to one folder that transformers loads."""

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from depthbench.config.validate import residual_of
from depthbench.data.tokenizers import Tokenizer, load_tokenizer
from depthbench.errors import UserError

from .card import model_card
from .code import code_files
from .names import Exported, check, exported_tensors, is_llama
from .reading import Weights
from .settings import generation_config, model_config
from .shards import write_shards
from .tokenizer import write_tokenizer

DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


@dataclass(frozen=True)
class Export:
    """What was written. remote_code: whether loading it needs `trust_remote_code`."""

    folder: Path
    weights: Weights
    tensors: list[Exported]
    dtype: torch.dtype
    remote_code: bool


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 10**9,
    overwrite: bool = False,
    warn: Callable[[str], None],
) -> Export:
    """Write the model in `checkpoint` (or the newest of a run folder) to the new folder `out`.

    dtype: of the weights; None keeps the checkpoint's. Memory: one shard at a time. The folder appears under its name
    when it is whole. warn: told of what does not stop the export.

    Raises UserError for an incomplete checkpoint, an `out` that is in the way, or a full disk.
    """
    weights = Weights(checkpoint)
    check_out(out, overwrite)
    residual = residual_of(weights.run)
    if "embedding.weight" not in weights.dtypes:
        raise UserError(f"checkpoint {weights.checkpoint.path}: model.embedding.weight is missing")
    dtype = dtype or weights.dtypes["embedding.weight"]
    tensors = exported_tensors(weights.run, residual, dtype)
    check(weights, tensors)
    tokenizer = tokenizer_of(weights, warn)
    eos = tokenizer.eod if tokenizer else None
    llama = is_llama(weights.run, residual)

    def read(tensor: Exported) -> Tensor:
        values = weights.read(tensor.logical, tensor.shape, tensor.dtype)
        if not torch.isfinite(values).all():
            count = int((~torch.isfinite(values)).sum())
            warn(f"{tensor.logical} has {count} elements of {values.numel()} that are NaN or infinite")
        return values

    partial = out.parent / f".exporting-{out.name}-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        write_shards(partial, tensors, max_shard_bytes, read)
        write_json(partial / "config.json", model_config(weights.run, residual, dtype, eos))
        write_json(partial / "generation_config.json", generation_config(eos))
        if tokenizer and (fault := write_tokenizer(partial, tokenizer, weights.run.model.sequence_length)):
            warn(fault)
        for name, text in {} if llama else code_files(residual).items():
            (partial / name).write_text(text)
        name = str(dtype).removeprefix("torch.")
        (partial / "README.md").write_text(model_card(weights, name, remote_code=not llama))
        publish(partial, out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"cannot write the export to {out}: {error}; nothing is left there") from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Export(out, weights, tensors, dtype, remote_code=not llama)


def check_out(out: Path, overwrite: bool, mark: str = "config.json", what: str = "export") -> None:
    """Raise UserError where `out` holds something that may not be replaced: anything but an earlier `what`, by its
    `mark`."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give the folder to write")
    held = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if not held:
        return
    if not overwrite:
        raise UserError(f"{out} is not empty ({len(held)} entries, {held[0]} first); give another, or --overwrite")
    if mark not in held:
        raise UserError(f"{out} is not empty and no {what} (it has no {mark}): --overwrite does not remove it")


def publish(partial: Path, out: Path) -> None:
    """Give a folder that is whole its name."""
    if not out.exists():
        os.rename(partial, out)
        return
    old = partial.with_name(f".replaced{partial.name}")
    os.rename(out, old)
    os.rename(partial, out)
    shutil.rmtree(old)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def tokenizer_of(weights: Weights, warn: Callable[[str], None]) -> Tokenizer | None:
    """The run's tokenizer. A checkpoint may have been moved to where it is not: that is no reason not to export."""
    try:
        return load_tokenizer(weights.run.data.tokenizer)
    except UserError as error:
        warn(f"the export has no tokenizer files and no end-of-text id: {error}")
        return None
