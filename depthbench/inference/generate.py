"""Writing on: read a prompt in chunks, then draw, read and draw again, one token at a time."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from .engine import Engine
from .sampling import Sampler


@dataclass(frozen=True)
class Generated:
    """tokens: what was written, the stopping one not among them. stopped_by: that one; None where the limit of tokens
    came first. first_seconds, seconds: until the first token was there, and the last."""

    tokens: list[int]
    stopped_by: int | None
    first_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first."""
        drawn = len(self.tokens) + (self.stopped_by is not None) - 1
        return drawn / (self.seconds - self.first_seconds) if drawn > 0 else None


def generate(
    engine: Engine,
    prompt: Sequence[int],
    sampler: Sampler,
    limit: int,
    stop: Collection[int] = (),
    chunk: int | None = None,
    show: Callable[[int], None] = lambda token: None,
) -> Generated:
    """One text, on an engine whose batch is 1. A collective call of all ranks, which all get the same.

    Args:
        prompt: ids; none of them ends anything.
        limit: tokens at most, at least 1.
        stop: ids that end the text.
        chunk: tokens of the prompt that are read at once; None: all.
        show: called with each token as it is written.

    Raises UserError as `Engine.read`.
    """
    began = time.perf_counter()
    engine.reset()
    logits = engine.read(torch.tensor([list(prompt)], dtype=torch.long), chunk)
    tokens: list[int] = []
    first: float | None = None
    while True:
        token = int(engine.from_last_stage(None if logits is None else sampler(logits)))
        now = time.perf_counter() - began
        first = now if first is None else first
        if token in stop:
            return Generated(tokens, token, first, now)
        tokens.append(token)
        show(token)
        if len(tokens) == limit:
            return Generated(tokens, None, first, now)
        logits = engine.read(torch.tensor([[token]]))
