"""Blocks are dealt evenly or as the settings say, and what cannot be dealt is refused with a valid choice."""

import ast
import re
from itertools import product

import pytest

from depthbench.pipeline.layout import Layout, balanced, layout

SIZES = list(product((1, 2, 3, 4, 8), (1, 2, 3, 4), range(1, 40)))
"""(stages, chunks a stage, blocks)."""


def blocks_of(found: Layout) -> list[list[int]]:
    return [list(range(*found.span(chunk))) for chunk in range(found.num_chunks)]


def test_blocks_are_dealt_evenly() -> None:
    """Twelve blocks over two stages of three chunks: two each, consecutive, stages taking turns."""
    found = layout(12, 2, 3)
    assert blocks_of(found) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert [list(found.chunks_of(stage)) for stage in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    assert (found.num_stages, found.num_chunks, found.chunks_per_stage) == (2, 6, 3)
    assert [found.sublayer(chunk) for chunk in range(7)] == [0, 4, 8, 12, 16, 20, 24]


def test_blocks_are_dealt_as_given() -> None:
    """Each chunk holds what its entry says, in depth order."""
    found = layout(7, 2, 2, [1, 3, 2, 1])
    assert blocks_of(found) == [[0], [1, 2, 3], [4, 5], [6]]
    assert [found.sublayer(chunk) for chunk in range(5)] == [0, 2, 8, 12, 14]
    assert [list(found.chunks_of(stage)) for stage in (0, 1)] == [[0, 2], [1, 3]]


def test_one_stage_holds_everything() -> None:
    """A model that is not cut is a layout like any other."""
    assert blocks_of(layout(5, 1, 1)) == [[0, 1, 2, 3, 4]]


def test_every_block_is_on_exactly_one_chunk_and_every_chunk_on_one_stage() -> None:
    """In depth order and without empty chunks, for every size that can be dealt."""
    dealt = 0
    for stages, virtual, num_layers in SIZES:
        chunks = stages * virtual
        if chunks > num_layers or (stages == 1 and virtual > 1):
            continue
        found = layout(num_layers, stages, virtual, balanced(num_layers, chunks))
        assert [block for chunk in blocks_of(found) for block in chunk] == list(range(num_layers))
        assert all(blocks_of(found))
        assert sorted(c for stage in range(stages) for c in found.chunks_of(stage)) == list(range(chunks))
        for stage in range(stages):
            assert [chunk % stages for chunk in found.chunks_of(stage)] == [stage] * virtual
        if num_layers % chunks == 0:
            assert found == layout(num_layers, stages, virtual)
        dealt += 1
    assert dealt > 200


def test_balanced_is_even_and_spares_the_last_chunk_then_the_first() -> None:
    """No chunk has two blocks more than another; the last is never heavier than any, the first only than the last."""
    for num_layers, chunks in product(range(1, 60), range(1, 40)):
        if chunks > num_layers:
            continue
        blocks = balanced(num_layers, chunks)
        assert len(blocks) == chunks and sum(blocks) == num_layers
        assert max(blocks) - min(blocks) <= 1
        assert blocks[-1] == min(blocks)
        assert blocks[0] == min(blocks) or list(blocks).count(min(blocks)) == 1


# -- refusals ---------------------------------------------------------------------------------------------------------
def refusal(num_layers: int, stages: int, virtual: int, blocks: list[int] | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        layout(num_layers, stages, virtual, blocks)
    return str(caught.value)


def example(message: str) -> list[int]:
    """The list that a message proposes: its last one."""
    proposed: list[int] = ast.literal_eval(re.findall(r"\[[^]]*\]", message)[-1])
    return proposed


def test_what_does_not_divide_is_refused_with_a_list_that_works() -> None:
    """For every size that does not divide; the message has both numbers."""
    refused = 0
    for stages, virtual, num_layers in SIZES:
        chunks = stages * virtual
        if chunks > num_layers or num_layers % chunks == 0 or stages == 1:
            continue
        message = refusal(num_layers, stages, virtual)
        assert f"model.num_layers={num_layers} " in message and f"= {chunks} chunks" in message
        assert f"parallel.pipeline={stages} x parallel.virtual_pipeline={virtual}" in message
        layout(num_layers, stages, virtual, example(message))
        refused += 1
    assert refused > 100


def test_the_proposal_for_seven_blocks_over_four_chunks() -> None:
    """The last chunk, with the head, is the light one."""
    message = refusal(7, 2, 2)
    assert "model.num_layers=7 does not divide over parallel.pipeline=2 x parallel.virtual_pipeline=2 = 4" in message
    assert "for example pipeline.blocks_per_chunk=[2, 2, 2, 1]" in message


def test_interleaving_without_stages_is_refused() -> None:
    """One stage has nothing to interleave with."""
    message = refusal(8, 1, 2)
    assert "parallel.virtual_pipeline=2 needs parallel.pipeline of at least 2, it is 1" in message
    assert "set parallel.virtual_pipeline=1" in message


def test_more_chunks_than_blocks_are_refused() -> None:
    """With or without a list, since some chunk would be empty."""
    for blocks in (None, [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]):
        message = refusal(5, 2, 3, blocks)
        assert "parallel.pipeline=2 x parallel.virtual_pipeline=3 = 6 chunks for model.num_layers=5" in message
        assert "at most 5" in message


@pytest.mark.parametrize("blocks", [[], [8], [2, 2, 2], [2, 2, 2, 1, 1], [2, 2, 2, 3], [3, 3, 2, 0], [4, 4, 1, -1]])
def test_a_wrong_list_is_refused_with_a_right_one(blocks: list[int]) -> None:
    """Of another length, of another sum, or with an entry below one."""
    message = refusal(8, 2, 2, blocks)
    assert f"pipeline.blocks_per_chunk={blocks} has {len(blocks)} entries that add up to {sum(blocks)}" in message
    assert "= 4 chunks, 8 in all" in message
    assert layout(8, 2, 2, example(message)) == layout(8, 2, 2)


def test_a_list_for_a_model_in_one_piece_may_only_name_all_its_blocks() -> None:
    """The list is checked wherever it is given."""
    assert layout(4, 1, 1, [4]) == layout(4, 1, 1)
    assert "add up to 3" in refusal(4, 1, 1, [3])
