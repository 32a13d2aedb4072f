"""Megatron-Core on a machine without CUDA: requests for a CUDA device become requests for the CPU.

`install()` does nothing where a CUDA device exists. Everything else of Megatron-Core (schedules, DDP, optimizers,
checkpoints) then runs unchanged over gloo, so what is tested on a CPU is the code that runs on GPUs.
"""

import contextlib
import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_mode: "_CudaToCpu | None" = None


def _is_cuda(device: Any) -> bool:
    return isinstance(device, torch.device | str) and str(device).startswith("cuda")


class _CudaToCpu(TorchFunctionMode):
    """Covers factories (`device="cuda"` is written out all over Megatron-Core) and Tensor methods, in one place that
    can be left again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers compare with 'torch.cuda.FloatTensor' and the like
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    """Stands in for torch.cuda.Stream and torch.cuda.Event: on a CPU everything is in order already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def record_event(self, event: Any = None) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


def _patch_torch_cuda() -> None:
    # One function object per name: torch._dynamo refuses an object that it knows under two names.
    patches = dict(
        current_device=lambda: CPU,
        device_count=lambda: 1,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        current_stream=lambda device=None: _Stream(),
        default_stream=lambda device=None: _Stream(),
        stream=lambda stream: contextlib.nullcontext(),
        Stream=_Stream,
        Event=type("_Event", (_Stream,), {}),
        default_generators=(torch.default_generator,),  # the CUDA generator is the CPU generator
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
    )
    for name, value in patches.items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, value)


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random

    assert hasattr(random, "_set_cuda_rng_state"), "megatron.core.tensor_parallel.random changed; see cpu_stand_in.py"
    # the original goes through torch.cuda._lazy_call, which would queue the call for ever
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.default_generator.set_state(state)
    # "CPU RNG state changed within GPU RNG context": always so here
    logging.getLogger(random.__name__).setLevel(logging.ERROR)


def install() -> None:
    """Call once per process, in the main thread, before any model is built."""
    global _mode
    if _mode is not None or torch.cuda.is_available():
        return
    _patch_megatron()  # first: it imports torch._dynamo
    _patch_torch_cuda()
    _mode = _CudaToCpu()
    _mode.__enter__()
