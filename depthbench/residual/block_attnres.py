"""Attention Residuals: each sublayer reads a learned softmax mixture of earlier outputs.

Sources are the embedding b_0 and the finished blocks b_n, each the sum of the raw outputs of `sublayers_per_block`
sublayers; within a block the running sum is one more source. There is no running residual.

    z_k = depth_attention(sources, query_k * gain_k / temperature)      read:  norm(z_k)
                                                                        write:  sum <- sum + F(norm(z_k))

Sublayer 0 reads the embedding itself and has no query. The output is one more read over all sources, then the final
norm. With zero queries (their initial value) the model equals Pre-LN up to eps. One-sublayer blocks are Full AttnRes.
Readers of one group attend over the sources they share at once, when the first of them reads (two-phase form).

Source: arXiv 2603.15031 Eq. 2-6; DepthBench `attnres`. State: live `sum` [S, B, D] inside a block, history `source.n`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .depth_read import DepthRead, done_ahead, link
from .norms import RMSNorm
from .olmo import OlmoFormat, OlmoSetting
from .protocol import Connection, Cost, Kept, Read, Residual, Shape, Upcycling
from .state import DepthState, StateSpec, TensorSpec


@dataclass(frozen=True)
class BlockAttnResConfig:
    """Give the block length in sublayers or the number of blocks."""

    sublayers_per_block: int | None = None
    num_blocks: int | None = None  # at most: blocks get ceil(2L / num_blocks) sublayers, so at L=14, 8 makes 7 blocks
    temperature: float = 1.0  # divides the logits
    key_norm: bool = True  # false: keys are the sources themselves, and there is no gain
    key_norm_eps: float = 1e-5
    read_norm_eps: float = 1e-5  # of the pre-norms that follow a depth read, and of the final norm
    read_norm_eps_of_sum: bool = False  # true: meant for the sum of the sources; their mean gets it over N^2
    norm_eps: float = 1e-6  # of the pre-norm of sublayer 0

    def depth_read(self, sublayer: int, width: int, dtype: torch.dtype) -> DepthRead:
        return DepthRead(sublayer, width, self.key_norm_eps if self.key_norm else None, self.temperature, dtype)

    def eps_at(self, sublayer: int, block_length: int) -> float:
        """Of the norm that follows what `sublayer` (2L: the readout) reads."""
        if sublayer == 0:
            return self.norm_eps
        num_sources = 1 + math.ceil(sublayer / block_length)
        return self.read_norm_eps / num_sources**2 if self.read_norm_eps_of_sum else self.read_norm_eps


class BlockAttnResConnection(Connection):
    def __init__(self, sublayer: int, block_length: int, width: int, cfg: BlockAttnResConfig, dtype: torch.dtype):
        super().__init__()
        self.finished_block = (sublayer + 1) // block_length if (sublayer + 1) % block_length == 0 else None
        self.depth_read = cfg.depth_read(sublayer, width, dtype) if sublayer else None
        self.norm = RMSNorm(width, cfg.eps_at(sublayer, block_length), dtype)

    def read(self, state: DepthState) -> Read:
        if self.depth_read is None:
            return Read(self.norm(state.history["source.0"]), carry={})
        mixed, ahead = self.depth_read.mix(state)
        return Read(self.norm(mixed), carry=ahead)

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        total = state.live["sum"] + y if state.live else y
        if self.finished_block is None:
            return DepthState({"sum": total}, state.history, read.carry)
        return DepthState({}, {**state.history, f"source.{self.finished_block}": total}, read.carry)


class BlockAttnResReadout(nn.Module):
    def __init__(self, sublayer: int, block_length: int, width: int, cfg: BlockAttnResConfig, dtype: torch.dtype):
        super().__init__()
        self.depth_read = cfg.depth_read(sublayer, width, dtype)
        self.norm = RMSNorm(width, cfg.eps_at(sublayer, block_length), dtype)

    def forward(self, state: DepthState) -> Tensor:
        normalised: Tensor = self.norm(self.depth_read.mix(state)[0])
        return normalised


class BlockAttnRes(Residual, name="block_attnres"):
    Config = BlockAttnResConfig
    config: BlockAttnResConfig
    olmo = OlmoFormat(
        ("attnres", "attn_res"),
        former=("attnres_block_size", None),
        names={
            "attention_residual.depth_read.query": "attn_res_proj.weight",
            "attention_residual.depth_read.key_norm": "attn_res_norm.weight",
            "mlp_residual.depth_read.query": "mlp_res_proj.weight",
            "mlp_residual.depth_read.key_norm": "mlp_res_norm.weight",
            "readout.depth_read.query": "res_proj.weight",
            "readout.depth_read.key_norm": "res_norm.weight",
        },
        rows=frozenset({"attn_res_proj.weight", "mlp_res_proj.weight", "res_proj.weight"}),
        unused=frozenset({"attn_res_proj.weight", "attn_res_norm.weight"}),  # of block 0, in other systems' files
        settings={"sublayers_per_block": OlmoSetting("attnres_block_size", 1, in_effect="block_length")},
        constants={
            **{"temperature": 1.0, "key_norm": True, "key_norm_eps": 1e-5},
            **{"read_norm_eps": 1e-5, "read_norm_eps_of_sum": False},
        },
    )

    def __init__(self, config: BlockAttnResConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        total, length, blocks = shape.num_sublayers, config.sublayers_per_block, config.num_blocks
        for name, given in (("sublayers_per_block", length), ("num_blocks", blocks)):
            if given is not None and not 1 <= given <= total:
                raise ValueError(f"residual.{name}={given} must lie in 1..{total} (two sublayers a layer)")
        if not config.temperature > 0:
            raise ValueError(f"residual.temperature={config.temperature} must be above 0")
        if length is not None and blocks is None:
            self.block_length = length
        elif blocks is not None and length is None:
            self.block_length = -(-total // blocks)
        else:
            raise ValueError(
                f"give residual.sublayers_per_block or residual.num_blocks, one of them; got {length} and {blocks}"
            )

    def start(self, embedding: Tensor) -> DepthState:
        return DepthState({}, {"source.0": embedding})

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return BlockAttnResConnection(sublayer, self.block_length, self.shape.hidden_size, self.config, dtype)

    def readout(self, dtype: torch.dtype) -> nn.Module:
        shape = self.shape
        return BlockAttnResReadout(shape.num_sublayers, self.block_length, shape.hidden_size, self.config, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        """With zero queries a read is the mean of sources whose sum is h, and a norm undoes the factor."""
        return Upcycling(replace(self.config, norm_eps=norm_eps, read_norm_eps=norm_eps, read_norm_eps_of_sum=True))

    def _groups(self, sublayers: Iterable[int]) -> list[list[int]]:
        """Groups of about sqrt(2L) reads, whole blocks each: fewest passes over sources where blocks are short."""
        reads = sorted(sublayers)
        length = self.block_length * max(1, round(math.sqrt(self.shape.num_sublayers) / self.block_length))
        if len(reads) <= length:
            length = 2 * self.shape.num_sublayers  # one group
        groups: dict[int, list[int]] = {}
        for sublayer in reads:
            if sublayer:  # the first reads the embedding as it is
                # the last read, over all sources, has the last sublayer's group
                number = min(sublayer, self.shape.num_sublayers - 1) // length
                groups.setdefault(number, []).append(sublayer)
        return list(groups.values())

    def share(self, readers: Mapping[int, Any], most: int | None = None) -> None:
        link(([readers[sublayer].depth_read for sublayer in group] for group in self._groups(readers)), most)

    def reads_ahead(self, first: int, last: int, most: int | None = None) -> list[list[int]]:
        groups = self._groups(range(first, last + 1))
        return [part for group in groups for part in done_ahead(group, lambda k: len(self.state_at(k).history), most)]

    def state_at(self, sublayer: int) -> StateSpec:
        width = (self.shape.hidden_size,)
        live = (TensorSpec("sum", width),) if sublayer % self.block_length else ()
        return StateSpec(
            live, tuple(TensorSpec(f"source.{n}", width) for n in range(sublayer // self.block_length + 1))
        )

    def num_parameters(self) -> int:
        total, width = self.shape.num_sublayers, self.shape.hidden_size
        each_read = 2 if self.config.key_norm else 1  # query and key gain
        return (total + 1) * width + each_read * total * width  # norms, then all reads but sublayer 0's

    def num_sources(self, sublayer: int) -> int:
        state = self.state_at(sublayer)
        return len(state.live) + len(state.history)

    def flops_per_token(self) -> Cost:
        """Two products of length D a source and read; the paper counts 2 + floor(k/b) sources where there are
        1 + ceil(k/b)."""
        width, total = self.shape.hidden_size, self.shape.num_sublayers
        exact = sum(self.num_sources(k) for k in range(1, total + 1))
        paper = exact
        if self.block_length > 1:
            paper = sum(2 + k // self.block_length for k in range(1, total)) + self.num_sources(total)
        return Cost(4 * width * exact, 4 * width * paper)

    def kept(self, sublayer: int) -> Kept:
        """The running sum that it writes, and of each source that it reads a norm and a weight."""
        written = self.shape.hidden_size if sublayer < self.shape.num_sublayers else 0
        return Kept(tokens=written, scalars=2 * self.num_sources(sublayer))

    def probe(self, state: DepthState) -> Tensor:
        newest: Tensor = state.live["sum"] if state.live else next(reversed(state.history.values()))
        return newest
