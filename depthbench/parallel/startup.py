"""Process groups: torch.distributed and Megatron-Core's, from the environment that torchrun sets."""

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from depthbench.config.schema import RunConfig
from depthbench.errors import UserError

from . import cpu_stand_in
from .context import ParallelContext
from .megatron import megatron_config

TIMEOUT_VARIABLE = "DEPTHBENCH_TIMEOUT_SECONDS"  # of collective operations; a launcher's word on the cluster
# a pipeline's watchdog comes first, and says more than a process group's own timeout
LONGER_THAN_THE_WATCHDOG = 2.0


def world_from_environment() -> tuple[int, int, int]:
    """(rank, world size, local rank); a process that torchrun did not start is a world of one.

    Raises UserError where several tasks of a Slurm step would each be one, or where this rank has no GPU of its own.
    """
    if "WORLD_SIZE" not in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        raise UserError(
            f"Slurm started {os.environ['SLURM_NTASKS']} tasks without torchrun: each would train alone in one run "
            "folder. Start one task a node, and torchrun in it"
        )
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and "LOCAL_RANK" not in os.environ:
        raise UserError(f"WORLD_SIZE={world_size} but LOCAL_RANK is not set: start the processes with torchrun")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this node has no GPU: there are {torch.cuda.device_count()}. Start as many "
            'processes as GPUs, or set CUDA_VISIBLE_DEVICES="" to run on the CPU'
        )
    return rank, world_size, local_rank


def collective_seconds(run: RunConfig) -> float:
    """How long a collective operation may wait: as the launcher says, but longer than a stage waits for a message."""
    seconds = float(os.environ.get(TIMEOUT_VARIABLE, 1800))
    if run.parallel.pipeline > 1 and run.pipeline.timeout is not None:
        return max(seconds, LONGER_THAN_THE_WATCHDOG * run.pipeline.timeout)
    return seconds


def start(run: RunConfig) -> ParallelContext:
    """Join the world, divide it by `run.parallel`, and return this rank's place. Call once a process."""
    if run.train.deterministic:  # read when the libraries start
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    cpu_stand_in.install()
    rank, world_size, local_rank = world_from_environment()
    seconds = collective_seconds(run)
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            # one queue: communication of tensor parallelism then starts in the order in which it was issued
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            torch.cuda.set_device(local_rank)
        alone = world_size == 1 and "MASTER_ADDR" not in os.environ
        store = dist.HashStore() if alone else None
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=seconds),
            device_id=torch.device("cuda", local_rank) if cuda else None,
        )
    if run.train.deterministic:
        torch.use_deterministic_algorithms(True)
    megatron = megatron_config(run)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=megatron.tensor_model_parallel_size,
        pipeline_model_parallel_size=megatron.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
        distributed_timeout_minutes=math.ceil(seconds / 60),  # of every group but the world, which has its own
        create_gloo_process_groups=False,  # our checkpoints do not use them
    )
    model_parallel_cuda_manual_seed(run.seed)  # Megatron's layers ask for its random-state tracker
    tp_group = parallel_state.get_tensor_model_parallel_group()
    dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return ParallelContext(
        megatron=megatron,
        tp_group=tp_group,
        dp_group=dp_group,
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
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
