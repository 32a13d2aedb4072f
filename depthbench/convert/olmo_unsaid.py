"""What a checkpoint of DepthBench's code does not say, found out by the loss on a text.

Revisions of that code computed some settings differently (HC's readout) and no file tells which one trained a
checkpoint. The weights fit one of them: read the other way, a trained model predicts visibly worse. So each is run on a
text of the kind that it was trained on, and one is taken only where its lead is beyond doubt.

Shapes: S tokens, B sequences, V vocabulary.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from depthbench.config.load import parse_overrides
from depthbench.data.tokenizers import load_tokenizer
from depthbench.errors import UserError

from .importing import run_of
from .olmo import OlmoSource
from .trainers_model import run_trainers_model

WINDOW, WINDOWS = 512, 2  # tokens
LEAST = 64  # predicted tokens
LEAD, ERRORS = 0.02, 5.0  # nats a token, and standard errors of the difference, by which one must be better


@dataclass(frozen=True)
class Trial:
    """One way to read the checkpoint. losses: of each predicted token, in nats, [B * (S - 1)]."""

    settings: dict[str, Any]
    losses: Tensor

    @property
    def mean(self) -> float:
        return float(self.losses.mean())

    def describe(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{said}: {self.mean:.4f} nats a token"


def decided(source: OlmoSource, words: Sequence[str], text: Path | None) -> OlmoSource:
    """`source` with nothing left open: by `words` (`readout=norm_then_sum`), else by the loss on the file `text`.

    Raises UserError where neither is given or both, or the losses do not tell.
    """
    groups, given = parse_overrides(list(words))
    if groups:
        example = next(iter(source.unsaid))
        raise UserError(
            f"--set {next(iter(groups))}=...: give fields that the checkpoint leaves open, as {example}=..."
        )
    if given:
        source = OlmoSource(source.folder, given)
    if not source.unsaid:
        if text is not None:
            raise UserError(f"--text={text}: --set {' '.join(words)} says already what it would tell; give one of them")
        return source
    if text is None:
        fields = "; ".join(f"{name} is one of {', '.join(values)}" for name, values in source.unsaid.items())
        example = next(iter(source.unsaid))
        raise UserError(
            f"{source.folder} does not say how to read it: revisions of DepthBench's code differ, and {fields}. Give a "
            f"text of the kind it was trained on, --text FILE, to see which predicts it, or --set {example}="
            f"{source.unsaid[example][0]}"
        )
    trials = tried(source, text_tokens(source, text))
    chosen = best(trials, math.log(source.model.vocab_size))
    found = OlmoSource(source.folder, {**given, **chosen.settings})
    found.origin["found_by_loss"] = [trial.describe() for trial in trials]
    return found


def tried(source: OlmoSource, tokens_BS: Tensor) -> list[Trial]:
    """Every way to read the checkpoint, run by the trainer's model in float32."""
    run = run_of(source, Path(), torch.float32)
    trials = []
    for values in itertools.product(*source.unsaid.values()):
        settings = dict(zip(source.unsaid, values, strict=True))
        candidate = replace(run, residual=replace(source.residual, **settings))
        logits_BSV = run_trainers_model(candidate, lambda name, _: source.read(name), tokens_BS, torch.float32).logits
        losses = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="none")
        trials.append(Trial(settings, losses.to(torch.float64)))
    return trials


def best(trials: Sequence[Trial], guessing: float) -> Trial:
    """The one with the lowest loss. guessing: the loss of one who knows nothing.

    Raises UserError where its lead over another may be chance, or where it is no better than guessing.
    """
    first, *others = sorted(trials, key=lambda trial: trial.mean)
    said = "; ".join(trial.describe() for trial in trials)
    if not first.mean < guessing:
        raise UserError(
            f"no way to read the checkpoint predicts the text better than guessing ({guessing:.4f} nats a token): "
            f"{said}. Give a --text of the kind it was trained on, or --set what it is"
        )
    for other in others:
        worse = other.losses - first.losses
        error = float(worse.std()) / math.sqrt(len(worse))
        if not float(worse.mean()) >= max(LEAD, ERRORS * error):  # NaN is not
            raise UserError(
                f"the losses on {len(worse)} tokens do not tell how to read the checkpoint: {said}; a lead of "
                f"{max(LEAD, ERRORS * error):.3f} is needed. Give another --text, or --set what it is"
            )
    return first


def text_tokens(source: OlmoSource, text: Path) -> Tensor:
    """[B, S] tokens of the file's beginning.

    Raises UserError without a tokenizer, a text, or enough tokens that the model knows.
    """
    if source.tokenizer is None:
        raise UserError(f"{source.folder} has no tokenizer/ to read --text with; put it there, or --set what it is")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --text={text}: {error}") from error
    length = min(WINDOW, source.model.sequence_length)
    (ids,) = load_tokenizer(source.tokenizer).encode_batch([content])
    rows = max(1, min(len(ids) // length, WINDOWS * WINDOW // length))
    tokens_BS = torch.tensor(ids[: rows * length]).view(rows, -1)
    if tokens_BS.numel() - rows < LEAST:
        raise UserError(f"--text={text} has {len(ids)} tokens; {LEAST + rows} are the least, and more are better")
    if int(tokens_BS.max()) >= source.model.vocab_size:
        largest = int(tokens_BS.max())
        raise UserError(f"the tokenizer gives id {largest}, the model has {source.model.vocab_size}: it is another's")
    return tokens_BS
