"""Depth reads of a chunk in two phases: the mixture of a direct read, and each finished block read once a block.

Shapes: S tokens, B sequences, D hidden.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.config.schema import RunConfig
from depthbench.inference.engine import Engine
from depthbench.model.build import build_stage
from depthbench.parallel import startup
from depthbench.residual import Shape, architecture, depth_read
from depthbench.residual.protocol import Connection
from depthbench.residual.state import DepthState
from tests.harness import join_world, run_workers
from tests.models import small_run

LAYERS, WIDTH, BLOCKS = 12, 20, 4
LENGTH = 2 * LAYERS // BLOCKS


def built(num_blocks: int) -> tuple[Any, dict[int, Any]]:
    """The architecture, and its readers by sublayer, with random queries and gains."""
    kind = architecture("block_attnres")
    residual = kind(kind.Config(num_blocks=num_blocks), Shape(LAYERS, WIDTH, 2, 2, 10))
    readers: dict[int, Any] = {k: residual.connection(k, torch.float64) for k in range(2 * LAYERS)}
    readers[2 * LAYERS] = residual.readout(torch.float64)
    generator = torch.Generator().manual_seed(1)
    for reader in readers.values():
        for parameter in reader.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return residual, readers


@torch.no_grad()
def run(residual: Any, readers: dict[int, Any]) -> list[Tensor]:
    """What each sublayer and the readout get, where a sublayer is a rotation of its input's channels."""
    embedding = torch.randn(7, 2, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    state: DepthState = residual.start(embedding)
    found = []
    for sublayer in range(2 * LAYERS):
        connection: Connection = readers[sublayer]
        read = connection(state)
        found.append(read.hidden)
        state = connection.write(state, read, read.hidden.roll(sublayer + 1, -1), {})
    return [*found, readers[2 * LAYERS](state)]


def direct(readers: dict[int, Any]) -> None:
    """No reader knows of another."""
    depth_read.link([reader.depth_read] for reader in readers.values() if reader.depth_read is not None)


@pytest.mark.parametrize("most", [None, 1, 2, 4])
@pytest.mark.parametrize("num_blocks", [1, BLOCKS, 5, 2 * LAYERS])
def test_two_phases_equal_one(num_blocks: int, most: int | None) -> None:
    residual, readers = built(num_blocks)
    direct(readers)
    expected = run(residual, readers)
    residual.share(readers, most)
    for ours, theirs in zip(run(residual, readers), expected, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-12


class Reads:
    """Passes over finished sources, by how many there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead: list[tuple[int, int]] = []  # (sources, queries)
        one, many = depth_read.depth_attention, depth_read.attend_ahead
        self.finished = 0  # sources read one query at a time

        def counted_one(sources: Sequence[Tensor], *rest: Any) -> Tensor:
            self.finished += len(sources)
            return one(sources, *rest)

        def counted_many(sources: Sequence[Tensor], queries: Sequence[Tensor], eps: float | None) -> Any:
            self.ahead.append((len(sources), len(queries)))
            return many(sources, queries, eps)

        monkeypatch.setattr(depth_read, "depth_attention", counted_one)
        monkeypatch.setattr(depth_read, "attend_ahead", counted_many)


def test_finished_blocks_are_read_once_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of six sublayers. Blocks 2 and 3 find 3 and 4 finished sources, each of which they read once, in one
    pass for all their six reads (the last block's seven: the readout is among them); one at a time that would be
    6 x 3 + 7 x 4. Blocks 0 and 1, with 1 and 2 sources, read them directly: mixtures kept ahead would be more to move.
    All other reads are of running sums, and of the last block by the readout."""
    residual, readers = built(BLOCKS)
    residual.share(readers)
    reads = Reads(monkeypatch)
    run(residual, readers)
    assert reads.ahead == [(3, LENGTH), (4, LENGTH + 1)]
    sums = BLOCKS * (LENGTH - 1)
    early = (LENGTH - 1) * 1 + LENGTH * 2  # sublayer 0 has no read
    assert reads.finished == early + sums + 1


def test_bounded_groups_read_once_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four reads at once: blocks 2 and 3 go over their sources twice, by parts of 4 and 2, or 4 and 3. Two reads of 3
    or 4 sources are less to move one by one."""
    residual, readers = built(BLOCKS)
    residual.share(readers, 4)
    reads = Reads(monkeypatch)
    run(residual, readers)
    assert reads.ahead == [(3, 4), (4, 4), (4, 3)]
    assert residual.reads_ahead(0, 2 * LAYERS, 4) == [[12, 13, 14, 15], [18, 19, 20, 21], [22, 23, 24]]
    assert residual.reads_ahead(0, 2 * LAYERS) == [list(range(12, 18)), list(range(18, 25))]


def finished_reads(rank: int, world_size: int, store: str, run: RunConfig, most: list[int | None]) -> list[int]:
    """Finished sources that a model passes over while it reads one text, with so many reads done ahead at most."""
    join_world(rank, world_size, store)
    stage = build_stage(run, startup.start(run))
    sums = sum(len(stage.residual.state_at(k).live) for k in range(1, stage.residual.shape.num_sublayers + 1))
    found = []
    for each in most:
        with pytest.MonkeyPatch.context() as monkeypatch:
            reads = Reads(monkeypatch)
            Engine([stage], None, 1, 5, most_ahead=each).read(torch.tensor([[1, 2, 3, 4, 5]]))
        found.append(reads.finished - sums + sum(sources for sources, _ in reads.ahead))
    return found


def test_reads_of_a_model() -> None:
    """28 layers in 8 blocks of 7 sublayers. One by one: 6 reads of 1 finished source, 7 of each of 2 .. 7, 8 of 8 (the
    readout is among them), and the readout's of the last block. Ahead: once from the third block on. By parts of 4:
    blocks 2 .. 6 do 4 reads ahead and then 3, with 3 sources one by one; the last block 4 and 4.

    The first two blocks read once a sublayer where once a block would do: by `two_phases_read_less`, keeping 13
    mixtures moves more than the 17 passes that it would spare."""
    tiny = {"num_layers": 28, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "num_kv_heads": 1}
    run = small_run("block_attnres", {"num_blocks": 8}, model=tiny)
    early, last = 6 * 1 + 7 * 2, 1
    one_by_one = early + 7 * (3 + 4 + 5 + 6 + 7) + 8 * 8 + last
    ahead = early + (3 + 4 + 5 + 6 + 7) + 8 + last
    by_parts = early + (3 + 3 * 3) + 2 * (4 + 5 + 6 + 7) + 2 * 8 + last
    assert (one_by_one, ahead) == (260, 54)
    spared, mixtures = early - 1 - 2, 6 + 7
    assert ahead - spared == 37 and spared < 2 * mixtures
    assert run_workers(1, finished_reads, run, [1, None, 4]) == [[one_by_one, ahead, by_parts]]


def test_reads_of_a_model_with_short_blocks() -> None:
    """32 layers in 16 blocks of 4 sublayers, two blocks a group. The first group reads one by one: 3 reads of 1 source
    and 4 of 2. Every later one reads what is finished before it once, and the block that finishes within it once a
    sublayer; the readout reads two such blocks. Groups of one block (by parts of 4; the readout, over 17 sources, is
    then alone) make more passes."""
    tiny = {"num_layers": 32, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "num_kv_heads": 1}
    run = small_run("block_attnres", {"sublayers_per_block": 4}, model=tiny)
    early = 3 * 1 + 4 * 2
    one_by_one = early + 4 * sum(range(3, 17)) + 17
    by_two_blocks = early + sum(range(3, 16, 2)) + 7 * 4 + 2
    by_blocks = early + sum(range(3, 17)) + 17
    assert (one_by_one, by_two_blocks, by_blocks) == (560, 104, 161)
    assert run_workers(1, finished_reads, run, [1, None, 4]) == [[one_by_one, by_two_blocks, by_blocks]]
