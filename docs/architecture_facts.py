"""What the code says of a file of configs/residual/, for docs/make_architectures.py: parameters, state, cost."""

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.planning.flops import forward_exact
from depthbench.residual import Residual
from depthbench.residual.parameters import Init, ParameterSpec
from depthbench.residual.state import StateSpec, TensorSpec

RECIPE, SHAPE = "depthbench_400m", "400m_L24"
LETTERS = {"D": ("hidden_size", 2.0), "H": ("num_heads", 2.0), "G": ("num_kv_heads", 0.5), "K": ("head_dim", 2.0)}
"""Letter of a size -> the field of `Shape` that has it, and a factor to vary it with."""
FEW = 40  # numbers that are written out

Place = int | str
"""A sublayer's number, or what comes after all of them."""
Key = tuple[str, Place, str]
"""(`parameter`, `projection` or `state`; sublayer, or block of a projection; name)"""


@dataclass(frozen=True)
class Found:
    """A parameter in all places that have it alike, with its initial value in each."""

    name: str
    shape: str
    values: dict[Place, str]
    decay: bool
    float32: bool
    count: int  # scalars, all places together


class Architecture:
    """What configs/residual/<name>.yaml makes of the recipe at the shape."""

    def __init__(self, file: Path) -> None:
        self.file, self.name = file, file.stem
        self.run = self.recipe(RECIPE, f"model={SHAPE}")
        self.residual = residual_of(self.run)
        self.shape = self.residual.shape
        self.module = importlib.import_module(type(self.residual).__module__)
        self.docstring = self.module.__doc__ or ""

    def recipe(self, name: str, *words: str) -> RunConfig:
        return load_run(name, [f"residual={self.file}", *words])

    @property
    def source(self) -> str:
        """From `Source:` of the docstring to the end of its paragraph, or to what says where the state is."""
        found = re.search(r"Source:\s+(.*?)(?:\.\s+State:|\.?\s*\n\s*\n|\.?\s*\Z)", self.docstring, re.DOTALL)
        return " ".join(found[1].split()) if found else "-"

    # -- sizes as letters ---------------------------------------------------------------------------------------------
    @cached_property
    def varied(self) -> dict[str, dict[Key, tuple[int, ...]]]:
        """All sizes at shapes that differ in one size each, by that size's letter; with "" those at the shape."""
        sizes = {"": _sizes(self.residual)}
        for letter, (field, factor) in LETTERS.items():
            shape = dataclasses.replace(self.shape, **{field: int(getattr(self.shape, field) * factor)})
            sizes[letter] = _sizes(type(self.residual)(self.run.residual, shape))
        return sizes

    def letters(self, key: Key) -> str:
        """`[4 D, 24]`: sizes that are in proportion to the shape's as letters, other ones as numbers."""
        written = []
        for axis, size in enumerate(self.varied[""][key]):
            others = {letter: self.varied[letter][key][axis] for letter in LETTERS}
            used = [letter for letter in LETTERS if others[letter] != size]
            unit = 1
            for letter in used:
                unit *= getattr(self.shape, LETTERS[letter][0])
            proportional = size % unit == 0 and all(others[one] == size * LETTERS[one][1] for one in used)
            number = [] if used and size == unit else [str(size // unit)]
            written.append(" ".join(number + used) if proportional else str(size))
        return f"[{', '.join(written)}]"

    # -- parameters ---------------------------------------------------------------------------------------------------
    def parameters(self) -> list[Found]:
        """What connections and readout declare, then the projections that MLPs compute for them."""
        groups: dict[tuple[str, str, bool, bool, bool], dict[Place, nn.Parameter]] = {}
        for (_, place, name), parameter in _declared(self.residual).items():
            decay, float32 = _spec(parameter).decay, parameter.dtype == torch.float32
            shape = self.letters(("parameter", place, name))
            groups.setdefault((name, shape, decay, float32, isinstance(place, int)), {})[place] = parameter
        found = []
        for (name, shape, decay, float32, _), alike in groups.items():
            values = {place: _first_value(_spec(parameter)) for place, parameter in alike.items()}
            found.append(Found(name, shape, values, decay, float32, sum(p.numel() for p in alike.values())))
        return found + list(self._projections())

    def _projections(self) -> Iterator[Found]:
        """As `model.mlp` declares them: initialised like the backbone's weights, and decayed."""
        blocks: dict[str, list[Place]] = {}
        for kind, block, name in self.varied[""]:
            if kind == "projection":
                blocks.setdefault(name, []).append(block)
        for name, where in blocks.items():
            key, std = ("projection", where[0], name), self.run.model.init_std * self.residual.init_scale(name)
            values: dict[Place, str] = {2 * int(block) + 1: f"random, deviation {std:.4g}" for block in where}
            count = len(where) * torch.Size(self.varied[""][key]).numel()
            yield Found(f"mlp.{name}.weight", self.letters(key), values, True, False, count)

    def where(self, places: Iterable[Place]) -> str:
        """The places in words."""
        numbers = [place for place in places if isinstance(place, int)]
        total = self.shape.num_sublayers
        if not numbers:
            return ", ".join(map(str, places))
        if numbers == list(range(total)):
            return "every sublayer"
        if len(numbers) > 1 and len({number % 2 for number in numbers}) == 1:
            branch, blocks = ("attention", "MLP")[numbers[0] % 2], [number // 2 for number in numbers]
            return f"every {branch}" if len(blocks) == total // 2 else f"{branch} of blocks {_ranges(blocks)}"
        return f"sublayer{'s' * (len(numbers) > 1)} {_ranges(numbers)}"

    # -- cost and state -----------------------------------------------------------------------------------------------
    def rest_of_forward(self) -> float:
        """Forward FLOPs per token of all but the residual path, at the model's sequence length."""
        tokens = self.run.model.sequence_length
        return forward_exact(self.run, tokens) / tokens - self.residual.flops_per_token().exact

    @cached_property
    def states(self) -> list[StateSpec]:
        """Before each sublayer, and before the readout."""
        return [self.residual.state_at(sublayer) for sublayer in range(self.shape.num_sublayers + 1)]

    @property
    def middle(self) -> int:
        return self.shape.num_layers // 2 * 2

    @property
    def largest(self) -> int:
        return max(range(len(self.states)), key=self.elements)

    def elements(self, sublayer: int) -> int:
        """Scalars per token in the state before a sublayer."""
        state = self.states[sublayer]
        return sum(torch.Size(tensor.shape).numel() for tensor in (*state.live, *state.history))

    def in_hidden_states(self, sublayer: int) -> str:
        return f"{self.elements(sublayer) / self.shape.hidden_size:g}"

    def tensors(self, sublayer: int, kind: str) -> Iterator[tuple[str, str, str]]:
        """Of the state before a sublayer: names, numbered ones together; shape in letters; placement."""
        groups: dict[TensorSpec, list[str]] = {}
        for tensor in getattr(self.states[sublayer], kind):
            groups.setdefault(dataclasses.replace(tensor, name=_stem(tensor.name)), []).append(tensor.name)
        for alike, names in groups.items():
            words = f"`{names[0]}`" + (f" to `{names[-1].rpartition('.')[2]}`" if len(names) > 1 else "")
            yield words, self.letters(("state", sublayer, names[0])), alike.placement.value

    def held(self, kind: str) -> str:
        """All that there is at some depth, numbered tensors together and counted: `source` [D] x 9."""
        first: dict[str, str] = {}
        names: dict[str, set[str]] = {}
        for sublayer, state in enumerate(self.states):
            for tensor in getattr(state, kind):
                stem = _stem(tensor.name)
                names.setdefault(stem, set()).add(tensor.name)
                if stem not in first:
                    first[stem] = f"`{stem}` {self.letters(('state', sublayer, tensor.name))}"
        counts = {stem: "" if some == {stem} else f" x {len(some)}" for stem, some in names.items()}
        return ", ".join(first[stem] + counts[stem] for stem in first) or "-"


def _declared(residual: Residual) -> dict[Key, nn.Parameter]:
    """Built in bfloat16 where nothing else is asked. Not on the meta device: `fixed` initial values would be made there
    too, and be lost; what is allocated here is never written to."""
    places: dict[Place, nn.Module] = {
        sublayer: residual.connection(sublayer, torch.bfloat16) for sublayer in range(residual.shape.num_sublayers)
    }
    places["readout"] = residual.readout(torch.bfloat16)
    return {("parameter", place, name): p for place, module in places.items() for name, p in module.named_parameters()}


def _sizes(residual: Residual) -> dict[Key, tuple[int, ...]]:
    shape = residual.shape
    sizes: dict[Key, tuple[int, ...]] = {key: tuple(p.shape) for key, p in _declared(residual).items()}
    for block in range(shape.num_layers):
        for projection in residual.extra_projections(block):
            sizes["projection", block, projection.name] = (projection.rows, shape.hidden_size)
    for sublayer in range(shape.num_sublayers + 1):
        state = residual.state_at(sublayer)
        sizes.update({("state", sublayer, tensor.name): tensor.shape for tensor in (*state.live, *state.history)})
    return sizes


def _stem(name: str) -> str:
    """`source.3` -> `source`."""
    return re.sub(r"\.\d+$", "", name)


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 5 -> `1-3, 5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _spec(parameter: nn.Parameter) -> ParameterSpec:
    spec: ParameterSpec = parameter.spec  # type: ignore[attr-defined]
    return spec


def _first_value(spec: ParameterSpec) -> str:
    return "; ".join(_value(part.shape, part.init) for part in spec.parts)


def _value(shape: tuple[int, ...], init: Init) -> str:
    one, other = (init(shape, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    if not torch.equal(one, other):
        return f"random, deviation {one.std().item():.2g}"
    if (one == one.flatten()[0]).all():
        return f"{one.flatten()[0].item():g}"
    return _numbers(one) if one.numel() <= FEW else "fixed"


def _numbers(values: torch.Tensor) -> str:
    if values.dim() == 0:
        return f"{values.item():g}"
    return f"[{', '.join(map(_numbers, values))}]"
