"""Which blocks each model chunk holds.

With P stages (ranks of a pipeline) and V chunks a stage, chunk c = 0 .. PV - 1 runs on stage c mod P as that stage's
virtual chunk c // P, and holds consecutive blocks after those of chunk c - 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Layout:
    """num_stages: P. starts: first block of each chunk, then the number of blocks; chunks are numbered in depth
    order."""

    num_stages: int
    starts: tuple[int, ...]

    @property
    def num_chunks(self) -> int:
        return len(self.starts) - 1

    @property
    def chunks_per_stage(self) -> int:
        return self.num_chunks // self.num_stages

    def span(self, chunk: int) -> tuple[int, int]:
        """Blocks [first, last) of a chunk."""
        return self.starts[chunk], self.starts[chunk + 1]

    def sublayer(self, chunk: int) -> int:
        """The sublayer before which a chunk begins; that of chunk PV is 2L."""
        return 2 * self.starts[chunk]

    def chunks_of(self, stage: int) -> range:
        return range(stage, self.num_chunks, self.num_stages)


def layout(num_layers: int, stages: int, chunks_per_stage: int, blocks: Sequence[int] | None = None) -> Layout:
    """Blocks dealt evenly, or as `blocks` says: how many each chunk holds, in depth order.

    Raises ValueError, with the nearest valid choice, where a chunk would be empty or blocks do not add up.
    """
    chunks = stages * chunks_per_stage
    named = f"parallel.pipeline={stages} x parallel.virtual_pipeline={chunks_per_stage} = {chunks} chunks"
    if stages == 1 and chunks_per_stage > 1:
        raise ValueError(
            f"parallel.virtual_pipeline={chunks_per_stage} needs parallel.pipeline of at least 2, it is 1; "
            "set parallel.virtual_pipeline=1"
        )
    if chunks > num_layers:
        most = max(num_layers // stages, 1)
        fewer = "" if stages <= num_layers else f"parallel.pipeline={num_layers} and "
        raise ValueError(
            f"{named} for model.num_layers={num_layers}: a chunk would hold no block; at most {num_layers} chunks: set "
            f"{fewer}parallel.virtual_pipeline={most}"
        )
    if blocks is None:
        if num_layers % chunks:
            raise ValueError(
                f"model.num_layers={num_layers} does not divide over {named}; say how many blocks each chunk holds, "
                f"for example pipeline.blocks_per_chunk={list(balanced(num_layers, chunks))}"
            )
        blocks = [num_layers // chunks] * chunks
    if len(blocks) != chunks or sum(blocks) != num_layers or min(blocks) < 1:
        raise ValueError(
            f"pipeline.blocks_per_chunk={list(blocks)} has {len(blocks)} entries that add up to {sum(blocks)}; it "
            f"needs one of at least 1 for each of {named}, {num_layers} in all, for example "
            f"pipeline.blocks_per_chunk={list(balanced(num_layers, chunks))}"
        )
    return Layout(stages, (0, *accumulate(blocks)))


def balanced(num_layers: int, chunks: int) -> tuple[int, ...]:
    """As even as can be, the last chunk (which has the head) and then the first (the embedding) lightest."""
    small, extra = divmod(num_layers, chunks)
    heavier = sorted(range(chunks), key=lambda chunk: (chunk == chunks - 1, chunk == 0, chunk))[:extra]
    return tuple(small + (chunk in heavier) for chunk in range(chunks))
