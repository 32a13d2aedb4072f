"""Models run with the weights of one part in memory at a time."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from .memory import give_back


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made meanwhile get parameters without storage. All else is made as ever: buffers and tables that no file
    holds, which the meta device would lose."""
    register = nn.Module.register_parameter

    def without_storage(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is tied must stay the same
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            empty.__dict__.update(parameter.__dict__)
            parameter = empty
        register(module, name, parameter)

    nn.Module.register_parameter = without_storage  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Layerwise:
    """Gives a model of `parameters_on_meta` its weights: those of `parts` while they run, all others at once."""

    def __init__(self, model: nn.Module, parts: Collection[nn.Module], read: Callable[[str], Tensor]) -> None:
        """read: gives the values of a parameter, in the type to compute in, by its name in `model`."""
        self._read = read
        self._held: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {part: [] for part in parts}
        owners = {module: part for part in parts for module in part.modules()}
        for path, module in model.named_modules():
            for leaf, _ in module.named_parameters(recurse=False):
                place = (module, leaf, f"{path}.{leaf}" if path else leaf)
                if module in owners:
                    self._held[owners[module]].append(place)
                else:
                    self._fill([place])

    def _fill(self, places: list[tuple[nn.Module, str, str]]) -> None:
        for module, leaf, name in places:
            setattr(module, leaf, nn.Parameter(self._read(name), requires_grad=False))

    @contextlib.contextmanager
    def present(self, part: nn.Module) -> Iterator[None]:
        """`part` has its weights meanwhile."""
        self._fill(self._held[part])
        try:
            yield
        finally:
            for module, leaf, _ in self._held[part]:
                empty = torch.empty_like(getattr(module, leaf), device="meta")
                setattr(module, leaf, nn.Parameter(empty, requires_grad=False))
            give_back()

    def hook(self, parts: Iterable[nn.Module]) -> None:
        """Let each of `parts` have its weights whenever it is called."""
        for part in parts:
            running = contextlib.ExitStack()
            part.register_forward_pre_hook(partial(self._enter, running))
            part.register_forward_hook(partial(self._leave, running), always_call=True)

    def _enter(self, running: contextlib.ExitStack, part: nn.Module, args: object) -> None:
        running.enter_context(self.present(part))

    @staticmethod
    def _leave(running: contextlib.ExitStack, part: nn.Module, args: object, output: object) -> None:
        running.close()
