"""The next token from its logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from depthbench.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """temperature: divides the logits; 0 takes the likeliest token. top_p: only the likeliest tokens take part, as many
    as it takes for their probabilities to reach this sum. seed: of the draws."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"a temperature of {self.temperature} must be a number from 0 (greedy) on")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p of {self.top_p} must be above 0 and at most 1")


class Sampler:
    """Draws on the CPU, so that a seed means the same on every device."""

    def __init__(self, sampling: Sampling, vocab_size: int | None = None) -> None:
        """vocab_size: ids from it on are never drawn: a model may have more than its tokenizer."""
        self.sampling, self.vocab_size = sampling, vocab_size
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def __call__(self, logits_BV: Tensor) -> Tensor:
        """A token a row, [B]."""
        logits_BV = logits_BV[:, : self.vocab_size]
        if self.sampling.temperature == 0:
            return logits_BV.argmax(-1).cpu()
        weights_BV = self.probabilities(logits_BV.cpu())
        return torch.multinomial(weights_BV, 1, generator=self.generator).squeeze(-1)

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """[B, V], float64."""
        weights_BV = torch.softmax(logits_BV.double() / self.sampling.temperature, -1)
        if self.sampling.top_p == 1:
            return weights_BV
        sorted_BV, order_BV = torch.sort(weights_BV, dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        kept_BV = sorted_BV.masked_fill(before_BV >= self.sampling.top_p, 0.0)
        kept_BV /= kept_BV.sum(-1, keepdim=True)
        return torch.zeros_like(weights_BV).scatter_(-1, order_BV, kept_BV)
