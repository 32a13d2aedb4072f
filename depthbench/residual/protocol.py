"""What a residual architecture answers, and nothing else in depthbench does.

An architecture is one file: a frozen config dataclass, a `Residual` that describes (state, cost, init) and builds, and
the modules it builds: one `Connection` per sublayer and one `Readout`. Sublayers are numbered globally from zero,
attention of block i is 2i and its MLP 2i + 1. For each sublayer the decoder runs

    read = connection(state)                    # connection.read
    y, taps = branch(read.hidden, ...)          # attention or MLP
    state = connection.write(state, read, y, taps)

and at the end `readout(state)`, which goes to the LM head. Defining the subclass with `name=` registers it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .olmo import OlmoFormat
from .state import DepthState, StateSpec


@dataclass(frozen=True)
class Shape:
    """The part of the model's shape that residual architectures depend on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def num_sublayers(self) -> int:
        return 2 * self.num_layers


class DepthKV(NamedTuple):
    """Keys (not rotated) and values of earlier sublayers, one pair per slot, each [S, B, H_kv, K]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class Read(NamedTuple):
    """What a sublayer gets from the depth state.

    hidden: [S, B, D], the branch's input, already normalised.
    depth_kv: extra keys and values for the attention's softmax.
    carry: whatever this connection's `write` wants back.
    """

    hidden: Tensor
    depth_kv: DepthKV | None = None
    carry: Any = None


class ExtraProjection(NamedTuple):
    """A projection [rows, D] of the normalised MLP input, computed with the MLP's own first matmul (so it is
    column-parallel and shares its all-gather). Its output [S, B, rows / TP] comes back in `taps[name]`. Initialised as
    the backbone's weights are."""

    name: str
    rows: int


class Connection(nn.Module, ABC):
    """Ties one sublayer to the depth state."""

    def forward(self, state: DepthState) -> Read:
        """`read`, as a call of the module: Megatron-Core's DDP waits for gathered weights in hooks on such calls."""
        return self.read(state)

    @abstractmethod
    def read(self, state: DepthState) -> Read: ...

    @abstractmethod
    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        """y: [S, B, D], the branch's output. taps: `keys` and `values` [S, B, H_kv, K] before RoPE from attention,
        the architecture's extra projections from an MLP."""


class Cost(NamedTuple):
    """Forward FLOPs per token of the residual path, multiply-add = 2; norms, softmax and element-wise work not counted
    (the paper's convention)."""

    exact: float
    paper: float


class Kept(NamedTuple):
    """What a sublayer's read and write keep for backward, numbers a token.

    norms: RMS norms over vectors of width D, each of which keeps its input. tokens: elements of further tensors that
    follow the tokens; heads: of those divided by KV head. scalars: float32 numbers. The branch's input is not counted:
    its first matmul keeps it.
    """

    norms: int = 1
    tokens: int = 0
    heads: int = 0
    scalars: int = 0


class Upcycling(NamedTuple):
    """How a trained Pre-LN model becomes one of this architecture.

    config: the settings that keep its function, as far as that goes.
    different: why the function does not stay the same; empty where it does, up to rounding.
    """

    config: Any
    different: str = ""


class Residual(ABC):
    """One architecture at one shape: pure description, no parameters of its own."""

    name: ClassVar[str]
    Config: ClassVar[type]
    llama_names: ClassVar[Mapping[str, str] | None] = None
    """Where transformers' own Llama computes the same function: what it calls this architecture's parameters (block and
    model prefixes apart). Its norms have one eps, `config.norm_eps`."""
    olmo: ClassVar[OlmoFormat | None] = None
    """How it lies in checkpoints of DepthBench's own code, where that has it."""
    registry: ClassVar[dict[str, type["Residual"]]] = {}

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:  # else a base of several architectures
            cls.name = name
            Residual.registry[name] = cls

    def __init__(self, config: Any, shape: Shape) -> None:
        """Raises ValueError where the config cannot work at this shape."""
        for field in fields(config):
            value = getattr(config, field.name)
            if field.name.endswith("eps") and value is not None and not value >= 0:
                raise ValueError(f"residual.{field.name}={value} must be at least 0")
        self.config = config
        self.shape = shape

    # -- the computation ------------------------------------------------------------------------------------------
    @abstractmethod
    def start(self, embedding: Tensor) -> DepthState:
        """State before sublayer 0. embedding: [S, B, D]."""

    @abstractmethod
    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection: ...

    @abstractmethod
    def readout(self, dtype: torch.dtype) -> nn.Module:
        """Module: DepthState -> [S, B, D], the normalised input of the LM head."""

    def share(self, readers: Mapping[int, nn.Module], most: int | None = None) -> None:
        """Lets readers that run one after the other, in one stage and without a checkpoint between them, share work.
        readers: connections by sublayer, and the readout at 2L where it belongs to them. most: of them that share at
        once, which bounds what they keep for each other."""
        return None  # most have nothing to share

    def reads_ahead(self, first: int, last: int, most: int | None = None) -> list[list[int]]:
        """Which of readers first .. last, where they `share`, are done at once when the first of them is due. Each then
        keeps a tensor [S, B, D] in float32 or better until its turn."""
        return []

    # -- its description ------------------------------------------------------------------------------------------
    @abstractmethod
    def state_at(self, sublayer: int) -> StateSpec:
        """What the state holds just before `sublayer` (2L: before the readout); only what is still read."""

    @abstractmethod
    def num_parameters(self) -> int:
        """All residual parameters of the whole model, norms included."""

    @abstractmethod
    def flops_per_token(self) -> Cost:
        """Of the whole model's residual path."""

    @abstractmethod
    def probe(self, state: DepthState) -> Tensor:
        """[S, B, ...]: the newest representation in a state that a sublayer has just written, for statistics."""

    def kept(self, sublayer: int) -> Kept:
        """By `sublayer` (2L: by the readout), for the plan of memory."""
        return Kept()

    def extra_projections(self, block: int) -> tuple[ExtraProjection, ...]:
        """Projections that block's MLP must compute for this architecture."""
        return ()

    def from_pre_ln(self, norm_eps: float) -> Upcycling | None:
        """From this config, for a Pre-LN model whose norms have `norm_eps`. None: nobody has thought it through."""
        return None

    def carried(self, sublayer: int, norm_D: Tensor) -> dict[str, Tensor]:
        """What takes over the weight of such a model's norm before `sublayer` (2L: its final norm), by name in the
        connection (the readout). All other residual parameters start at their initial values."""
        return {"norm.weight": norm_D}

    def init_scale(self, projection: str) -> float:
        """Factor on the initial deviation of a weight: q, k, v, out, gate, up, down or an extra projection."""
        return 1.0
