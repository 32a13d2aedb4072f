"""Process groups: torch.distributed and Megatron-Core's, from the environment that torchrun sets."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from depthbench.config.schema import RunConfig

from . import cpu_stand_in
from .context import ParallelContext
from .megatron import megatron_config

TIMEOUT = timedelta(minutes=30)


def world_from_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank); a process that torchrun did not start is a world of one."""
    return tuple(int(os.environ.get(name, default)) for name, default in _NAMES)  # type: ignore[return-value]


_NAMES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def start(run: RunConfig) -> ParallelContext:
    """Join the world, divide it by `run.parallel`, and return this rank's place. Call once a process."""
    cpu_stand_in.install()
    rank, world_size, local_rank = world_from_environment()
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local_rank)
        alone = world_size == 1 and "MASTER_ADDR" not in os.environ
        store = dist.HashStore() if alone else None
        dist.init_process_group(
            "nccl" if cuda else "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.parallel.tensor)
    model_parallel_cuda_manual_seed(run.seed)  # Megatron's layers ask for its random-state tracker
    tp_group = parallel_state.get_tensor_model_parallel_group()
    dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    megatron = megatron_config(run)
    return ParallelContext(
        megatron=megatron,
        tp_group=tp_group,
        dp_group=dp_group,
        tp_rank=tp_group.rank(),
        tp_size=tp_group.size(),
        dp_rank=dp_group.rank(),
        dp_size=dp_group.size(),
        sequence_parallel=megatron.sequence_parallel,
    )


def stop() -> None:
    """Leave the world in order, so that no rank's exit looks like a crash to the others."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
