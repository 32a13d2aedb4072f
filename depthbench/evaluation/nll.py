"""Negative log-likelihood of continuations, cut into tokens and scored as lm-evaluation-harness does it.

Shapes: B sequences, S tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthbench.errors import UserError


@dataclass(frozen=True)
class Sample:
    """context: at least one token. target: the tokens to score. size: UTF-8 bytes of their text.

    context_cut, target_cut: tokens that the length cap took from the context's head and the target's end.
    """

    context: list[int]
    target: list[int]
    size: int
    context_cut: int = 0
    target_cut: int = 0


def make_sample(tokenizer: Any, context: str, target: str, max_length: int) -> Sample:
    """Whitespace at the context's end counts as the target's; both are tokenized as one text, without special tokens,
    and parted where the context alone would end (the harness's `TemplateLM._encode_pair`).

    max_length: tokens that the model may be given at once; the last one of a sample is predicted, not given. What does
    not fit is taken from the context's head, as by the harness, and of a target that is longer by itself, from its end.

    Raises:
        UserError: the context is blank.
    """
    prompt = context.rstrip()
    text = context[len(prompt) :] + target
    before = _encode(tokenizer, prompt)
    if not before:
        raise UserError("the context is blank, and the first token of a text has no likelihood")
    after = _encode(tokenizer, prompt + text)[len(before) :]
    kept = after[:max_length]
    room = max_length + 1 - len(kept)
    size = len((tokenizer.decode(kept) if len(kept) < len(after) else text).encode())
    return Sample(before[-room:], kept, size, max(0, len(before) - room), len(after) - len(kept))


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@torch.no_grad()
def score(
    model: Any, samples: Sequence[Sample], batch_size: int, scored: Callable[[int], None] = lambda count: None
) -> list[float]:
    """Each sample's summed negative log-likelihood in nats, in the order given; 0 for one without target tokens.

    Log-probabilities are in float32 at least, sums in float64. Sequences of about equal length share a batch, padded
    on the right, where a causal model does not see it. scored: told how many samples a batch had.
    """
    found = [0.0] * len(samples)
    order = sorted(range(len(samples)), key=lambda n: -len(samples[n].context) - len(samples[n].target))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        for number, nll in zip(batch, _score_batch(model, [samples[n] for n in batch]), strict=True):
            found[number] = nll
        scored(len(batch))
    return found


def _score_batch(model: Any, samples: list[Sample]) -> list[float]:
    rows = [torch.tensor(sample.context + sample.target) for sample in samples]
    length = max(len(row) for row in rows) - 1
    input_BS = torch.zeros(len(rows), length, dtype=torch.long)
    mask_BS = torch.zeros_like(input_BS)
    for number, row in enumerate(rows):
        input_BS[number, : len(row) - 1] = row[:-1]
        mask_BS[number, : len(row) - 1] = 1
    logits_BSV = model(input_ids=input_BS.to(model.device), attention_mask=mask_BS.to(model.device)).logits
    return [
        _nll(logits_BSV[number, len(sample.context) - 1 : len(row) - 1], row[len(sample.context) :])
        for number, (sample, row) in enumerate(zip(samples, rows, strict=True))
    ]


def _nll(logits_SV: Tensor, target_S: Tensor) -> float:
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    chosen_S = logits_SV.log_softmax(-1).gather(-1, target_S.to(logits_SV.device)[:, None])
    return -float(chosen_S.double().sum())
