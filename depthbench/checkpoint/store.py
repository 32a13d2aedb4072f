"""Writing and reading checkpoints, all ranks together, through Megatron-Core's `dist_checkpointing`."""

import json
import multiprocessing
import os
import uuid
from collections.abc import Callable, Sequence
from inspect import signature
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from depthbench.config.schema import CheckpointConfig, CheckpointMode
from depthbench.errors import UserError
from depthbench.parallel.signals import serve_until_parent_ends

from . import folder
from .fence import Fence
from .folder import Published

# from 0.17 on, Megatron-Core's default for async saves is a package of its own that is not required here
_SAVE_OPTIONS: dict[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
)


def _start_results_queue() -> None:
    """The process through which Megatron-Core's writers report. Its own would be spawned (which imports everything
    again, 5 s) and would die of the signal that asks for a last save."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer=serve_until_parent_ends)
        filesystem_async._results_queue = manager.Queue()


def _as_state(tensors: Sequence[ShardedTensor]) -> dict[str, ShardedTensor]:
    """Distinct names for boxes of one key: `dist_checkpointing` wants a dictionary."""
    return {f"{tensor.key}@{number}": tensor for number, tensor in enumerate(tensors)}


class CheckpointWriter:
    """Saves into `root`, the folder `checkpoints` of a run's. Every call is collective.

    A save is written under a temporary name, its manifest last, and then renamed, so that a reader finds a whole
    checkpoint or none. In async mode a forked process writes a snapshot; `poll`, called every step, publishes it once
    all ranks are done, and `requested` and `published` are reported apart.
    """

    def __init__(self, root: Path, config: CheckpointConfig, report: Callable[[str], None]) -> None:
        self.root, self.config, self.report = root, config, report
        self.queue = AsyncCallsQueue(persistent=False)
        self.fence = Fence(root.parent)
        _start_results_queue()
        if dist.get_rank() == 0:
            self.fence.check()
            root.mkdir(parents=True, exist_ok=True)
            folder.remove_remnants(root)
        dist.barrier()

    def save(self, step: int, tensors: Sequence[ShardedTensor], manifest: dict[str, Any]) -> None:
        """Save as step `step`; in async mode wait for an earlier save first, then return while this one is written."""
        self.queue.maybe_finalize_async_calls(blocking=True)
        name = folder.folder_name(step)
        # a name of its own: the forked writer of a killed run may still be at work on the same step
        nonce = [uuid.uuid4().hex[:8]]
        dist.broadcast_object_list(nonce)
        writing = self.root / f".saving-{name}-{nonce[0]}"
        if dist.get_rank() == 0:
            writing.mkdir()
        dist.barrier()

        def publish() -> None:
            if dist.get_rank() == 0:
                _write_durably(writing / folder.MANIFEST, json.dumps(manifest, indent=1))
                self.fence.check()
                folder.publish(writing, self.root / name, self.fence.check)
                self.fence.check()  # the next attempt may be loading what is old now
                folder.retire(self.root, self.config.keep)
            dist.barrier()
            self.report(f"checkpoint {name} published in {self.root}")

        asynchronous = self.config.mode is CheckpointMode.ASYNC
        self.report(f"checkpoint {name} requested")
        request = dist_checkpointing.save(
            _as_state(tensors), str(writing), async_sharded_save=asynchronous, **_SAVE_OPTIONS
        )
        if asynchronous:
            request.add_finalize_fn(publish)
            self.queue.schedule_async_request(request)
        else:
            publish()

    def poll(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=False)

    def close(self) -> None:
        """Wait for a save in flight and publish it."""
        self.queue.maybe_finalize_async_calls(blocking=True)


def _write_durably(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_keys(stored: dict[str, tuple[int, ...]], wanted: Sequence[ShardedTensor], where: Path) -> None:
    """Compare what a checkpoint holds with what the whole model and optimizer need.

    Raises UserError naming tensors that are missing, left over or of another shape. A collective call: ranks of a
    pipeline need different tensors, and a distributed optimizer's rank may own nothing of some.
    """
    local = {tensor.key: tuple(tensor.global_shape) for tensor in wanted}
    everyone: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    needed = {key: shape for part in everyone for key, shape in part.items()}
    missing = sorted(needed.keys() - stored.keys())
    unexpected = sorted(stored.keys() - needed.keys())
    if missing or unexpected:
        raise UserError(
            f"checkpoint {where} does not belong to this model: missing {_some(missing)}; "
            f"unexpected {_some(unexpected)}"
        )
    for key, shape in sorted(needed.items()):
        if stored[key] != shape:
            raise UserError(f"checkpoint {where}: {key} has shape {stored[key]}, the model needs {shape}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "none"


def load(checkpoint: Published, tensors: Sequence[ShardedTensor], optional: Sequence[ShardedTensor] = ()) -> bool:
    """Fill `tensors` (views of live tensors) from a checkpoint, and `optional` if the stored shapes fit.

    Returns whether `optional` was loaded. Raises UserError as `check_keys`.
    """
    stored = checkpoint.tensor_shapes()
    fits = all(stored.get(tensor.key) == tuple(tensor.global_shape) for tensor in optional)
    optional_keys = {tensor.key for tensor in optional}
    check_keys({k: s for k, s in stored.items() if k not in optional_keys}, tensors, checkpoint.path)
    _fill(checkpoint, [*tensors, *(optional if fits else ())])
    return fits


def load_weights(checkpoint: Published, weights: Sequence[ShardedTensor], masters: Sequence[ShardedTensor]) -> None:
    """Fill the model's `weights` and the optimizer's `masters` of them from a checkpoint's weights, whatever else it
    holds. Each gets the stored values in its own type. Raises UserError as `check_keys`."""
    stored = {key: shape for key, shape in checkpoint.tensor_shapes().items() if key.startswith("model.")}
    check_keys(stored, weights, checkpoint.path)
    _fill(checkpoint, weights)
    _fill(checkpoint, masters)  # apart: they have the weights' keys


def _fill(checkpoint: Published, tensors: Sequence[ShardedTensor]) -> None:
    state = _as_state(tensors)
    targets = {name: tensor.data for name, tensor in state.items()}
    loaded = dist_checkpointing.load(state, str(checkpoint.path))
    for name, target in targets.items():
        if loaded[name].data_ptr() != target.data_ptr():
            target.copy_(loaded[name].view(target.shape))
