"""A Hugging Face model folder, as it is evaluated: the model, its tokenizer, and where both come from."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from depthbench.checkpoint.folder import find
from depthbench.errors import UserError

_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx")
_ROW = re.compile(r"^\| ([^|]+) \| (.*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Provenance:
    """What a result belongs to. What the model card of an export tells is None for other folders."""

    folder: str
    config_sha256: str
    architecture: str  # the residual one, or the class that config.json names
    parameters: int
    dtype: str
    step: str | None
    tokens: str | None
    trained_by: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evaluated:
    """model: in evaluation mode on its device. max_length: tokens that it may be given at once."""

    model: Any
    tokenizer: Any
    max_length: int
    provenance: Provenance


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises UserError where `folder` is no model, naming the way to one."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(_no_model(folder))
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a JSON {type(config).__name__}, no settings of a model")
    code = config.get("auto_map", {})
    if not isinstance(code, dict):
        raise UserError(f"{file}: auto_map={json.dumps(code)} is no object, which transformers cannot load; remove it")
    for name in code.values():
        if "--" in str(name):  # REPOSITORY--module.Class
            raise UserError(f"{file} takes code from elsewhere ({name}); only code in the folder itself is run")
    return config


def _no_model(folder: Path) -> str:
    if not folder.exists():
        return f"{folder} does not exist; EXPORT is a folder with a Hugging Face model (a hub's: hf download it first)"
    try:
        checkpoint = find(folder).path
    except UserError:
        return f"{folder} holds no Hugging Face model: it has no config.json"
    return f"{checkpoint} is a checkpoint: export it first, depthbench convert export {folder} exports/{folder.name}"


def cap(config: dict[str, Any], wanted: int | None) -> int:
    """Tokens that the model may be given at once: `wanted`, or as many as it has positions.

    Raises UserError for more than the model has, fewer than 2, or where neither says a number.
    """
    positions = next((int(config[name]) for name in _LENGTHS if config.get(name)), None)
    if wanted is None:
        if positions is None:
            raise UserError(f"config.json has none of {', '.join(_LENGTHS)}: give --max-length")
        return positions
    if wanted < 2:
        raise UserError(f"--max-length={wanted} must be at least 2: one token to give, one to predict")
    if positions is not None and wanted > positions:
        raise UserError(f"--max-length={wanted} is more than the model's {positions} positions; give at most those")
    return wanted


def load(folder: Path, device: str, dtype: str | None, max_length: int | None) -> Evaluated:
    """Load from the folder alone; code that lies in it is run.

    dtype: a name of torch's; None keeps the files'. Raises UserError for a folder that is no model or is not whole,
    a device that is not there, and as `cap`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds, which refusals need not wait for
    from transformers.utils import logging

    config = read_config(folder)
    length = cap(config, max_length)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device=cuda: torch sees no GPU here; leave it out to run on the CPU")
    logging.set_verbosity_error()  # texts longer than the model takes are cut and counted, not warned of
    logging.disable_progress_bar()
    local: dict[str, Any] = {"trust_remote_code": "auto_map" in config, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        wanted = getattr(torch, dtype) if dtype else "auto"
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, output_loading_info=True, **local)
    except (OSError, ValueError, ImportError, SafetensorError, RuntimeError) as error:  # the last: shapes that differ
        raise UserError(f"{folder} cannot be loaded: {error}") from error
    model, said = loaded
    if missing := sorted(said["missing_keys"]):  # transformers would draw them anew
        raise UserError(f"{folder} lacks {len(missing)} of the model's tensors, {missing[0]} first; write it anew")
    model = model.to(device).eval()
    return Evaluated(model, tokenizer, length, _provenance(folder, config, model))


def _provenance(folder: Path, config: dict[str, Any], model: Any) -> Provenance:
    card = folder / "README.md"
    rows = dict(_ROW.findall(card.read_text(errors="replace"))) if card.is_file() else {}
    named = config.get("architectures") or [type(model).__name__]
    return Provenance(
        folder=str(folder.resolve()),
        config_sha256=hashlib.sha256((folder / "config.json").read_bytes()).hexdigest(),
        architecture=rows.get("residual architecture", named[0]),
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        step=rows.get("step"),
        tokens=rows.get("tokens"),
        trained_by=rows.get("trained by"),
    )
