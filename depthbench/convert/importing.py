"""A foreign model written as a checkpoint of depthbench's own, which any layout can start from.

OUT/checkpoints/step_00000000/   the weights, in the format of a run's checkpoints
OUT/model.yaml, residual.yaml    settings, for `model=` and `residual=` of a run
OUT/tokenizer/                   the source's tokenizer, where it has one
"""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor

from depthbench.checkpoint import folder as checkpoints
from depthbench.checkpoint.streaming import Planned, write_tensors
from depthbench.config.load import plain
from depthbench.config.schema import DataConfig, OptimizerConfig, ParallelConfig, Precision, RunConfig, TrainConfig
from depthbench.config.validate import residual_of
from depthbench.data.tokenizers import load_tokenizer
from depthbench.errors import UserError

from .names import Exported, listed, named_tensors, tensor_faults
from .output import check_out, new_folder
from .reading import PREFIX
from .source import Source

STEP = checkpoints.folder_name(0)
PRECISIONS = {torch.float32: Precision.FP32, torch.bfloat16: Precision.BF16, torch.float64: Precision.FP64}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Import:
    """What was written. dtype: of the weights, but for those that training keeps in float32."""

    folder: Path
    run: RunConfig
    tensors: list[Exported]
    dtype: torch.dtype


def import_model(
    source: Source,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    warn: Callable[[str], None],
) -> Import:
    """Write `source` to the new folder `out`, which appears under its name when it is whole.

    dtype: float32, bfloat16 or float64; None: the narrowest of them that holds every weight of the source exactly.
    Memory: one tensor at a time. warn: told of what does not stop the import.

    Raises UserError where a tensor is missing or has another shape than the settings say, where `out` is in the way, or
    the disk is full.
    """
    check_out(out, overwrite, ours=_is_import)
    dtype = dtype or _holding_all(source)
    run = run_of(source, out, dtype)
    tensors = named_tensors(run.model, residual_of(run), dtype, llama=False)
    # of shapes a source tells none before it is read
    if faults := tensor_faults(dict.fromkeys(source.dtypes, ()), {t.logical: () for t in tensors}, ""):
        raise UserError(f"the source's weights and settings do not fit: {listed(faults)}")
    planned = {PREFIX + t.logical: Planned(PREFIX + t.logical, t.shape or (1,), t.dtype) for t in tensors}

    def make(key: str) -> Tensor:
        name, (_, shape, stored) = key.removeprefix(PREFIX), planned[key]
        values = source.read(name)
        if tuple(values.shape or (1,)) != shape:
            raise UserError(f"{name} has shape {tuple(values.shape)}, the settings make it {shape}")
        values = values.reshape(shape).to(stored)
        if not torch.isfinite(values).all():
            count = int((~torch.isfinite(values)).sum())
            warn(f"{name} has {count} elements of {values.numel()} that are NaN or infinite")
        return values

    with new_folder(out, "import") as partial:
        checkpoint = partial / "checkpoints" / STEP
        checkpoint.mkdir(parents=True)
        write_tensors(checkpoint, planned.values(), make)
        # what Megatron-Core's reader wants besides
        save_config(CheckpointingConfig("torch_dist"), str(checkpoint))
        torch.save({}, checkpoint / "common.pt")
        settings = plain(run)
        for group in ("model", "residual"):
            (partial / f"{group}.yaml").write_text(yaml.safe_dump(settings[group], sort_keys=False))
        _copy_tokenizer(source, partial, run, warn)
        (checkpoint / checkpoints.MANIFEST).write_text(json.dumps(_manifest(source, run), indent=1))
    return Import(out, run, tensors, dtype)


def _is_import(folder: Path) -> bool:
    """And nothing that was trained since."""
    steps = [checkpoint.step for checkpoint in checkpoints.published(folder / "checkpoints")]
    return (folder / "model.yaml").is_file() and max(steps, default=0) == 0


def _holding_all(source: Source) -> torch.dtype:
    """Float16 is none of the types that a run can have, so it counts as float32."""
    residual = residual_of(run_of(source, Path(), torch.bfloat16))
    tensors = named_tensors(source.model, residual, torch.bfloat16, llama=False)
    types = [source.dtypes[t.logical] for t in tensors if t.dtype is torch.bfloat16 and t.logical in source.dtypes]
    widest = functools.reduce(torch.promote_types, types, torch.bfloat16)
    return widest


def run_of(source: Source, out: Path, dtype: torch.dtype) -> RunConfig:
    """A run that has not begun: no data, no steps."""
    place = str(out.resolve() / "tokenizer") if source.tokenizer else "none"
    return RunConfig(
        name=out.name,
        model=source.model,
        architecture=source.architecture,
        residual=source.residual,
        parallel=ParallelConfig(),
        data=DataConfig(train=[], tokenizer=place),
        optimizer=OptimizerConfig(lr=0.0),
        train=TrainConfig(steps=0, global_batch=0, micro_batch=0, precision=PRECISIONS[dtype]),
    )


def _manifest(source: Source, run: RunConfig) -> dict[str, Any]:
    return {
        "format": 1,
        "weights_only": True,
        "origin": source.origin,
        "step": 0,
        "consumed_samples": 0,
        "updates": 0,
        "skipped": 0,
        "recent_grad_norms": [],
        "architecture": run.architecture,
        "precision": run.train.precision.value,
        "data": {},
        "settings": plain(run),
    }


def _copy_tokenizer(source: Source, partial: Path, run: RunConfig, warn: Callable[[str], None]) -> None:
    if source.tokenizer is None:
        warn("the source has no tokenizer.json and no tokenizer.model: the import has no tokenizer")
        return
    place = partial / "tokenizer"
    place.mkdir()
    beside = source.tokenizer if source.tokenizer.is_dir() else source.tokenizer.parent
    files = {source.tokenizer, *(beside / name for name in _TOKENIZER_FILES)}
    for file in sorted(file for file in files if file.is_file()):
        shutil.copyfile(file, place / file.name)
    try:
        found = load_tokenizer(place)
    except UserError as error:
        warn(f"the source's tokenizer cannot be used for training: {error}")
        return
    if found.vocab_size > run.model.vocab_size:
        warn(f"the tokenizer has {found.vocab_size} ids, more than the model's vocabulary of {run.model.vocab_size}")
