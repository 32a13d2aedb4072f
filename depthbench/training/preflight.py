"""Everything that can be wrong with a run, found before any process group starts.

Every rank runs it on its own; it changes nothing but the sample-index cache, which one process a node fills.
"""

import hashlib
import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import get_bin_path
from megatron.core.datasets.utils import Split

from depthbench.checkpoint.folder import Published, latest
from depthbench.config.load import plain
from depthbench.config.schema import EvalForm, RunConfig
from depthbench.config.validate import check_run
from depthbench.data.corpus import EpochedCorpus, WindowSettings, corpora, samples_from_each
from depthbench.data.indexed import check_prefix, read_sidecar
from depthbench.data.tokenizers import Tokenizer, load_tokenizer
from depthbench.errors import UserError

from .initial import find_initial


@dataclass(frozen=True)
class Preflight:
    """What the checks found out on the way."""

    folder: Path
    train: list[EpochedCorpus]
    weights: list[float]
    valid: list[EpochedCorpus]
    resume: Published | None
    initial: Published | None  # whose weights a run starts from that does not resume
    data_identity: dict[str, Any]
    last_step: int
    unigram_entropy: float | None  # of the validation tokens, in nats; None where nobody counted them

    @property
    def finished(self) -> bool:
        return self.resume is not None and self.resume.step >= self.last_step


def checkpoints_of(folder: Path) -> Path:
    return folder / "checkpoints"


def preflight(run: RunConfig, world_size: int, first_of_node: bool) -> Preflight:
    """Check settings, data, run folder and checkpoint; open the data.

    first_of_node: whether this process does what one process a node does for all: read through data and checkpoint
        files, fill the sample-index cache.

    Raises UserError, with the way out, for the first thing that is wrong.
    """
    check_run(run, world_size)
    tokenizer = _tokenizer(run)
    folder = _writable(Path(run.folder))
    cache = Path(run.data.index_cache or folder / "index-cache")
    for source in [*run.data.train, *run.data.valid]:
        info = check_prefix(source.prefix, run.model.vocab_size, tokenizer)
        if info.sidecar is None and first_of_node:
            _scan_once(source.prefix, run.model.vocab_size, cache)
    if run.log.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UserError(f"log.wandb_project={run.log.wandb_project} needs `pip install wandb`")
    settings = WindowSettings(
        sequence_length=run.model.sequence_length,
        vocab_size=run.model.vocab_size,
        eod=tokenizer.eod,
        seed=run.seed,
        index_cache=cache,
    )
    train, weights = corpora(run.data, Split.train, settings)
    valid = corpora(run.data, Split.valid, settings)[0] if run.train.eval_every else []
    identity = _identity(run, train, weights)
    resume = latest(checkpoints_of(folder))
    initial = None if resume else find_initial(run)
    if resume:
        _check_resume(resume, run, identity)
    if first_of_node and (begun := resume or initial):
        begun.check_files()
    if first_of_node:
        _build_indices(run, train, weights, valid, resume)
    last_step = min(run.train.steps, run.train.stop_at or run.train.steps)
    return Preflight(folder, train, weights, valid, resume, initial, identity, last_step, _unigram_entropy(run))


def _tokenizer(run: RunConfig) -> Tokenizer:
    tokenizer = load_tokenizer(run.data.tokenizer)
    if tokenizer.vocab_size > run.model.vocab_size:
        raise UserError(
            f"tokenizer {run.data.tokenizer} has {tokenizer.vocab_size} ids, more than "
            f"model.vocab_size={run.model.vocab_size}; set model.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _unigram_entropy(run: RunConfig) -> float | None:
    """What a model would lose that only knew how often each token occurs: the yardstick for a first loss. None unless
    all tokens of one prepared corpus, and no others, are validated on."""
    whole = len(run.data.valid) == 1 and run.data.eval_form is EvalForm.WINDOWS
    sidecar = read_sidecar(run.data.valid[0].prefix) if whole else None
    return sidecar.get("unigram_entropy_nats") if sidecar else None


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write to the run folder {folder}: {error.strerror}; set run_dir=FOLDER") from error
    return folder


def _identity(run: RunConfig, train: list[EpochedCorpus], weights: list[float]) -> dict[str, Any]:
    """What the sequence of training samples depends on; paths do not count, contents do."""
    return {
        "seed": run.seed,
        "model.sequence_length": run.model.sequence_length,
        "data.train weights": weights,
        "data.train documents": [corpus.fingerprint for corpus in train],
    }


def _check_resume(checkpoint: Published, run: RunConfig, identity: dict[str, Any]) -> None:
    manifest = checkpoint.manifest()
    if manifest.get("weights_only"):
        raise UserError(
            f"cannot resume from {checkpoint.path}: it has weights alone, no optimizer state. Start another run from "
            f"them with initial={checkpoint.path} and run_dir=FOLDER"
        )
    now = plain(run)
    stored = {
        "residual.architecture": manifest["architecture"],
        **manifest["data"],
        "train.precision": manifest["precision"],
    }
    wanted = {"residual.architecture": run.architecture, **identity, "train.precision": run.train.precision.value}
    for section in ("residual", "model"):  # tensors' shapes do not show a block length, RoPE's base or a norm's eps
        before = manifest["settings"][section]
        for name, value in now[section].items():
            if name in before:  # a field that the version before did not have is no difference
                stored[f"{section}.{name}"], wanted[f"{section}.{name}"] = before[name], value
    for key, value in wanted.items():
        if stored.get(key) != value:
            raise UserError(
                f"cannot resume from {checkpoint.path}: it was written with {key} = {stored.get(key)}, the run has "
                f"{value}. Restore that, or start another run with run_dir=FOLDER"
            )


def _scan_once(prefix: str, vocab_size: int, cache: Path) -> None:
    """Check every id of a corpus that `depthbench prepare` did not make, and remember it for the next start."""
    file = Path(get_bin_path(prefix)).resolve()
    found = file.stat()
    key = hashlib.sha256(f"{file}:{found.st_size}:{found.st_mtime_ns}:{vocab_size}".encode()).hexdigest()[:16]
    marker = cache / f"scanned-{key}"
    if not marker.is_file():
        check_prefix(prefix, vocab_size, scan=True)
        with _cache_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
            marker.touch()


@contextmanager
def _cache_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to the sample-index cache {cache}: {error.strerror}; set data.index_cache=FOLDER"
        ) from error


def _build_indices(
    run: RunConfig, train: list[EpochedCorpus], weights: list[float], valid: list[EpochedCorpus], at: Published | None
) -> None:
    done = at.manifest() if at else {"consumed_samples": 0, "step": 0}
    samples = done["consumed_samples"] + (run.train.steps - done["step"]) * run.train.global_batch
    with _cache_errors(train[0].settings.index_cache):
        for corpus, share in zip(train, samples_from_each(weights, samples), strict=True):
            corpus.build_index(share)
        for corpus in valid:
            corpus.build_index(1)
