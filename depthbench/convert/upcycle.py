"""A Pre-LN model as one of another architecture, at the same function where its mathematics allows it.

What an architecture makes of it is the architecture's own answer (`Residual.from_pre_ln`, `Residual.carried`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from depthbench.config.build import build
from depthbench.config.load import group_file, parse_overrides, read_yaml
from depthbench.errors import UserError
from depthbench.model.init import generator_for
from depthbench.residual import Residual, architecture
from depthbench.residual.parameters import ParameterSpec, truncated_normal

from .names import named_tensors
from .source import Source

SEED = 0  # of what the source does not have and starts at random
_RESIDUAL = re.compile(r"(?:blocks\.(\d+)\.(attention|mlp)_residual|readout)\.(.+)")


class Upcycled:
    """A `Source`: a Pre-LN source's backbone and norms with another architecture's parameters.

    different: why its function is another one than the source's; empty where it is the same.
    """

    def __init__(self, source: Source, residual: Residual, different: str) -> None:
        self.source, self.described, self.different = source, residual, different
        self.model, self.architecture, self.residual = source.model, residual.name, residual.config
        self.tokenizer = source.tokenizer
        self.origin: dict[str, Any] = {
            **source.origin,
            "upcycled_from": source.architecture,
            "function": f"another one: {different}" if different else "the same",
        }
        common = source.dtypes["embedding.weight"]
        tensors = named_tensors(self.model, residual, common, llama=False)
        self._shapes = {tensor.logical: tensor.shape for tensor in tensors}
        self.dtypes: Mapping[str, torch.dtype] = {t.logical: source.dtypes.get(t.logical, common) for t in tensors}

    def read(self, name: str) -> Tensor:
        place = self._place(name)
        if place is None:
            return self.source.read(name) if name in self.source.dtypes else self._projection(name)
        sublayer, path = place
        carried = self._carried(name, sublayer, path)
        if carried is not None:
            return carried
        if sublayer == self.described.shape.num_sublayers:
            return _initial(self.described.readout(torch.float64), path, name)
        return _initial(self.described.connection(sublayer, torch.float64), path, name)

    def rounds(self, stored: Mapping[str, torch.dtype]) -> bool:
        """Whether what was made of a norm's weight is only nearly itself in the types `stored`, by logical name."""
        for name, dtype in stored.items():
            if place := self._place(name):
                carried = self._carried(name, *place)
                if carried is not None and not torch.equal(carried, carried.to(dtype).to(carried)):
                    return True
        return False

    def _place(self, name: str) -> tuple[int, str] | None:
        """Of a residual parameter: its sublayer (2L: the readout) and its name there."""
        if found := _RESIDUAL.fullmatch(name):
            block, kind, path = found.groups()
            return 2 * int(block) + (kind == "mlp") if block else self.described.shape.num_sublayers, path
        return None

    def _carried(self, name: str, sublayer: int, path: str) -> Tensor | None:
        norm = self.source.read(name.removesuffix(path) + "norm.weight")
        return self.described.carried(sublayer, norm.to(torch.float64)).get(path)

    def _projection(self, name: str) -> Tensor:
        """An extra projection of an MLP's input, as training draws it."""
        scale = self.described.init_scale(name.split(".")[-2])
        return truncated_normal(self.model.init_std * scale)(self._shapes[name], generator_for(SEED, name))


def _initial(module: nn.Module, path: str, name: str) -> Tensor:
    spec: ParameterSpec = module.get_parameter(path).spec  # type: ignore[attr-defined]
    (part,) = spec.parts
    return part.init(part.shape, generator_for(SEED, name))


def upcycled(source: Source, residual: str | None, words: Sequence[str], allow_different: bool) -> Upcycled:
    """`source` as one of the architecture that `residual` names (a file under configs/residual/, or its path), with
    settings changed by `words` (`num_blocks=4`).

    Raises UserError where the source is no Pre-LN, settings are wrong, or the architecture cannot keep the function and
    that is not allowed.
    """
    if residual is None:
        raise UserError(f"--set {' '.join(words)} changes settings of the architecture that --residual names; name it")
    if architecture(source.architecture).llama_names is None:
        raise UserError(
            f"the source's architecture is {source.architecture}: only Pre-LN models can be made into another one; "
            "import it without --residual"
        )
    chosen, own = parse_overrides(list(words))
    if chosen:
        raise UserError(f"--set {next(iter(chosen))}=...: give fields of the architecture's settings, as num_blocks=4")
    settings = read_yaml(group_file("residual", residual))
    name = str(settings.pop("architecture", None))
    try:
        described = architecture(name)
        asked = described(build(described.Config, {**settings, **own}, "residual"), source.model.residual_shape)
        answer = asked.from_pre_ln(source.residual.norm_eps)
        if answer is None:
            raise UserError(f"{name} does not say what becomes of a Pre-LN model (Residual.from_pre_ln)")
        config = build(described.Config, {**asdict(answer.config), **own}, "residual")
        made = described(config, source.model.residual_shape)
    except ValueError as error:
        raise UserError(str(error)) from error
    kept = asdict(answer.config)
    undone = [
        f"{key}={value}, where {kept[key]} would keep it" for key, value in asdict(config).items() if value != kept[key]
    ]
    different = answer.different or "; ".join(undone)
    if different and not allow_different:
        raise UserError(
            f"as {name} the model would compute another function: {different}. --allow-different imports it all the "
            "same, and says how far off it is"
        )
    return Upcycled(source, made, different)
