"""The whole model:

    logits = W_head final_hidden(embedding[tokens])        (W_head is the embedding when tied)
    loss   = sum over unmasked (b, t) of  -log softmax(logits[b, t])[labels[b, t]]

Labels are already shifted by whoever makes them. `options` are the keyword arguments of the architecture's
`final_hidden`; an unknown one is a TypeError.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import block_attnres, deepnorm, hc, keel, lns, mhc, moda, pre_ln, sandwich_ln
from .layers import Shape, Weights, linear

__all__ = ["Shape", "reference_logits", "reference_loss"]

FINAL_HIDDEN: dict[str, Callable[..., Tensor]] = {
    "pre_ln": pre_ln.final_hidden,
    "sandwich_ln": sandwich_ln.final_hidden,
    "lns": lns.final_hidden,
    "deepnorm": deepnorm.final_hidden,
    "keel": keel.final_hidden,
    "block_attnres": block_attnres.final_hidden,
    "hc": hc.final_hidden,
    "mhc": mhc.final_hidden,
    "moda": moda.final_hidden,
}


def reference_logits(weights: Weights, tokens: Tensor, shape: Shape, architecture: str, **options: Any) -> Tensor:
    """[B, T] tokens to [B, T, V] logits."""
    embedding = weights["embedding.weight"][tokens]
    hidden = FINAL_HIDDEN[architecture](weights, embedding, shape, **options)
    return linear(hidden, weights["embedding.weight" if shape.tied else "head.weight"])


def reference_loss(
    weights: Weights, tokens: Tensor, shape: Shape, architecture: str, labels: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, int]:
    """Sum of the cross entropy over tokens whose mask (0/1 or bool) is set, and their number."""
    counted = mask.bool()
    logits = reference_logits(weights, tokens, shape, architecture, **options)[counted]
    log_probabilities = torch.log_softmax(logits, dim=-1).gather(-1, labels[counted][:, None])
    return -log_probabilities.sum(), int(counted.sum())
