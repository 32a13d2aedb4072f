"""Memory that tensors hold on a machine without a CUDA allocator to ask."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations have made within it and that are still alive, now and at most. What custom
    operations and autograd functions allocate inside is counted too; what a library allocates for itself is not."""

    def __init__(self) -> None:
        super().__init__()
        self.known = weakref.WeakSet[torch.UntypedStorage]()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage not in self.known:
                    self.known.add(storage)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, storage.nbytes())
        return made

    def _freed(self, size: int) -> None:
        self.now -= size
