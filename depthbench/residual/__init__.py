"""The residual architectures. Torch only: the trainer, the Hugging Face model and the diagnostics share them.

Every module of this package that defines a `Residual` subclass is found by itself.
"""

import difflib
import importlib
import pkgutil

from .protocol import Residual, Shape

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def architecture(name: str) -> type[Residual]:
    """The architecture called `name`.

    Raises ValueError naming the nearest one.
    """
    if name not in Residual.registry:
        nearest = difflib.get_close_matches(name, Residual.registry, 1, cutoff=0.0)[0]
        known = ", ".join(sorted(Residual.registry))
        raise ValueError(f"no residual architecture {name!r}; nearest is {nearest!r}; there are {known}")
    return Residual.registry[name]


__all__ = ["Residual", "Shape", "architecture"]
