"""Initial weights: a function of (seed, global parameter name) alone, so that every layout starts from one model."""

import hashlib

import torch
from torch import nn

from depthbench.parallel.context import ParallelContext
from depthbench.parallel.placement import logical_shards


def generator_for(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialize(model: nn.Module, seed: int, context: ParallelContext) -> None:
    """Fill every parameter. Each logical tensor is drawn whole, in float32, and this rank's piece cut out of it."""
    for name, parameter in model.named_parameters():
        parameter.zero_()  # padding rows of the vocabulary belong to no logical tensor
        for shard in logical_shards(name, parameter, context.tp_rank, context.tp_size):
            values = shard.part.init(shard.part.shape, generator_for(seed, shard.name))
            parameter[shard.local] = values[shard.glob].to(parameter)
