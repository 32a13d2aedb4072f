"""Reading in chunks, under every layout, gives the naive references' logits, and decoding goes on from there.

Ten architectures, and a Block AttnRes that does reads ahead; tensor and pipeline parallelism, chunks of the whole text,
of 7 and of 64 tokens, odd lengths, a cache of one page and of small ones. The everyday selection has every architecture
under every layout; `.ci/run` runs the rest (`-m matrix`).
"""

from functools import cache
from typing import Any

import pytest

from depthbench.config.validate import layout_of, residual_of

from .reading import AHEAD, MODELS, Found, Settings, compared, named, run_of

SHARED = {"tensor": 2, "sequence": True}
STAGES, CHUNKS = {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "tp2_sp": (2, SHARED),
    "pp2": (2, STAGES),
    "pp2_vp2": (2, CHUNKS),
    "pp2_tp2_sp": (4, {**STAGES, **SHARED}),
    "pp2_vp2_tp2_sp": (4, {**CHUNKS, **SHARED}),
}
EVERYDAY: dict[str, list[Settings]] = {
    "single": [(37, None, None), (37, 7, 10)],
    "tp2_sp": [(37, 7, None)],
    "pp2": [(37, 7, None)],
    "pp2_vp2_tp2_sp": [(37, 7, 10)],
}
# 131 = 2 * 64 + 3; 37 is shorter than a chunk of 64; in both, 7 and the whole leave something over for two ranks
ALL: list[Settings] = [(37, None, None), (37, 7, 10), (37, 64, 10), (131, None, 10), (131, 7, None), (131, 64, None)]
EQUAL = 1e-10


@cache
def answers(layout: str, everyday: bool) -> list[list[dict[Settings, Found]]]:
    world_size, parallel = LAYOUTS[layout]
    return compared(world_size, parallel, EVERYDAY[layout] if everyday else ALL)


def check(layout: str, number: int, everyday: bool) -> None:
    settings = EVERYDAY[layout] if everyday else ALL
    tensor = LAYOUTS[layout][1].get("tensor", 1)
    ranks = [rank[number] for rank in answers(layout, everyday) if rank[number]]
    assert len(ranks) == tensor, "logits are those of the last stage's ranks"
    for rank in ranks:
        assert list(rank) == settings
        for setting, found in rank.items():
            assert max(found.every, found.last, found.decoded) < EQUAL, (setting, found)
            assert found.next, setting


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_are_done_ahead(layout: str) -> None:
    """Of the last stage's chunk, whatever the layout."""
    run = run_of(MODELS.index(AHEAD), LAYOUTS[layout][1])
    first, last = layout_of(run).span(layout_of(run).num_chunks - 1)
    assert residual_of(run).reads_ahead(2 * first, 2 * last) == [[6, 7, 8]]


@pytest.mark.parametrize("layout", EVERYDAY)
@pytest.mark.parametrize("number", range(len(MODELS)), ids=named)
def test_reading_in_chunks(number: int, layout: str) -> None:
    check(layout, number, everyday=True)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(MODELS)), ids=named)
def test_the_rest_of_the_matrix(number: int, layout: str) -> None:
    check(layout, number, everyday=False)
