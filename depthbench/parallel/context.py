"""What a module needs to know of the layout it is built for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place. `megatron` is the config that Megatron-Core's layers, schedules and DDP read."""

    megatron: "TransformerConfig"
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    tp_rank: int
    tp_size: int
    dp_rank: int
    dp_size: int
    sequence_parallel: bool
