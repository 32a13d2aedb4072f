"""One checkpoint to one folder that transformers loads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from depthbench.config.validate import residual_of
from depthbench.data.tokenizers import Tokenizer, load_tokenizer
from depthbench.errors import UserError

from .card import model_card
from .code import code_files
from .names import Exported, check, exported_tensors, is_llama
from .output import check_out, new_folder, write_json
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

    with new_folder(out, "export") as partial:
        write_shards(partial, tensors, max_shard_bytes, read)
        write_json(partial / "config.json", model_config(weights.run, residual, dtype, eos))
        write_json(partial / "generation_config.json", generation_config(eos))
        if tokenizer and (fault := write_tokenizer(partial, tokenizer, weights.run.model.sequence_length)):
            warn(fault)
        for name, text in {} if llama else code_files(residual).items():
            (partial / name).write_text(text)
        name = str(dtype).removeprefix("torch.")
        (partial / "README.md").write_text(model_card(weights, name, remote_code=not llama))
    return Export(out, weights, tensors, dtype, remote_code=not llama)


def tokenizer_of(weights: Weights, warn: Callable[[str], None]) -> Tokenizer | None:
    """The run's tokenizer. A checkpoint may have been moved to where it is not: that is no reason not to export."""
    try:
        return load_tokenizer(weights.run.data.tokenizer)
    except UserError as error:
        warn(f"the export has no tokenizer files and no end-of-text id: {error}")
        return None
