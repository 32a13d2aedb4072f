"""Settings that the pipeline's schedules would refuse are refused before any process starts, with a choice that works.

The sample run has 6 blocks and 2 microbatches of 16 sequences a step.
"""

import re
from pathlib import Path

import pytest

from depthbench.config.load import load_run
from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_run, layout_of, local_share, microbatch_group
from depthbench.errors import UserError
from depthbench.pipeline.edges import Local

SAMPLE = str(Path(__file__).parents[1] / "config" / "sample_run.yaml")
P2, P3 = "parallel.pipeline=2", "parallel.pipeline=3"
P2_V3 = "parallel.pipeline=2 parallel.virtual_pipeline=3"
BATCH = "train.global_batch={}"

# words, processes, what the message says, words that its advice adds
REFUSED: dict[str, tuple[str, int, str, str]] = {
    "blocks do not divide": (
        "parallel.pipeline=4 train.global_batch=64",
        4,
        "model.num_layers=6 does not divide over parallel.pipeline=4 x parallel.virtual_pipeline=1 = 4 chunks; say how "
        "many blocks each chunk holds, for example pipeline.blocks_per_chunk=[1, 2, 2, 1]",
        "pipeline.blocks_per_chunk=[1,2,2,1]",
    ),
    "blocks do not divide over chunks": (
        "parallel.pipeline=2 parallel.virtual_pipeline=2",
        2,
        "parallel.pipeline=2 x parallel.virtual_pipeline=2 = 4 chunks; say how many blocks each chunk holds, for "
        "example pipeline.blocks_per_chunk=[1, 2, 2, 1]",
        "pipeline.blocks_per_chunk=[1,2,2,1]",
    ),
    "more chunks than blocks": (
        "parallel.pipeline=2 parallel.virtual_pipeline=4",
        2,
        "parallel.pipeline=2 x parallel.virtual_pipeline=4 = 8 chunks for model.num_layers=6: a chunk would hold no "
        "block; at most 6 chunks: set parallel.virtual_pipeline=3",
        "parallel.virtual_pipeline=3",
    ),
    "more stages than blocks": (
        f"parallel.pipeline=8 parallel.virtual_pipeline=2 {BATCH.format(384)}",
        24,
        "parallel.pipeline=8 x parallel.virtual_pipeline=2 = 16 chunks for model.num_layers=6: a chunk would hold no "
        "block; at most 6 chunks: set parallel.pipeline=6 and parallel.virtual_pipeline=1",
        "parallel.pipeline=6 parallel.virtual_pipeline=1",
    ),
    "interleaving without stages": (
        "parallel.virtual_pipeline=2",
        1,
        "parallel.virtual_pipeline=2 needs parallel.pipeline of at least 2, it is 1; set parallel.virtual_pipeline=1",
        "parallel.virtual_pipeline=1",
    ),
    "a list too short": (
        f"{P2} pipeline.blocks_per_chunk=[6]",
        2,
        "pipeline.blocks_per_chunk=[6] has 1 entries that add up to 6; it needs one of at least 1 for each of "
        "parallel.pipeline=2 x parallel.virtual_pipeline=1 = 2 chunks, 6 in all, for example "
        "pipeline.blocks_per_chunk=[3, 3]",
        "pipeline.blocks_per_chunk=[3,3]",
    ),
    "a list of another sum": (
        f"{P2} pipeline.blocks_per_chunk=[4,4]",
        2,
        "pipeline.blocks_per_chunk=[4, 4] has 2 entries that add up to 8",
        "pipeline.blocks_per_chunk=[3,3]",
    ),
    "an empty chunk": (
        f"{P2} pipeline.blocks_per_chunk=[6,0]",
        2,
        "pipeline.blocks_per_chunk=[6, 0] has 2 entries that add up to 6; it needs one of at least 1",
        "pipeline.blocks_per_chunk=[3,3]",
    ),
    "fewer microbatches than stages": (
        P3,
        3,
        "2 microbatches a step (train.global_batch=32 / train.micro_batch=16 / 1 data-parallel ranks) are fewer than "
        "parallel.pipeline=3 stages, most of which would idle; set train.global_batch=48 or more",
        BATCH.format(48),
    ),
    "fewer microbatches than stages, over data-parallel ranks": (
        P2,
        4,
        "1 microbatches a step (train.global_batch=32 / train.micro_batch=16 / 2 data-parallel ranks) are fewer than "
        "parallel.pipeline=2 stages, most of which would idle; set train.global_batch=64 or more",
        BATCH.format(64),
    ),
    "overlap without interleaving": (
        f"{P2} pipeline.overlap_p2p=true",
        2,
        "pipeline.overlap_p2p=true needs the interleaved schedule: parallel.virtual_pipeline is 1; set it to 2 or "
        "more, or pipeline.overlap_p2p=false",
        "pipeline.overlap_p2p=false",
    ),
    "a group without interleaving": (
        f"{P2} pipeline.microbatch_group=2",
        2,
        "pipeline.microbatch_group=2 needs the interleaved schedule: parallel.virtual_pipeline is 1; set it to 2 or "
        "more, or pipeline.microbatch_group=null",
        "pipeline.microbatch_group=null",
    ),
    "a group smaller than the stages": (
        f"{P2_V3} pipeline.microbatch_group=1",
        2,
        "pipeline.microbatch_group=1 must lie between 2 stages and 2 microbatches a step (train.global_batch=32 / "
        "train.micro_batch=16 / 1 data-parallel ranks): set pipeline.microbatch_group=2",
        "pipeline.microbatch_group=2",
    ),
    "a group larger than a step": (
        f"{P2_V3} pipeline.microbatch_group=3",
        2,
        "pipeline.microbatch_group=3 must lie between 2 stages and 2 microbatches a step",
        "pipeline.microbatch_group=2",
    ),
    "a last group smaller than the stages": (
        f"{P2_V3} pipeline.microbatch_group=4 {BATCH.format(80)}",
        2,
        "5 microbatches a step (train.global_batch=80 / train.micro_batch=16 / 1 data-parallel ranks) leave a last "
        "group of 1 after groups of pipeline.microbatch_group=4; the schedule wants none or at least "
        "parallel.pipeline=2: set train.global_batch=64, or pipeline.microbatch_group=3",
        BATCH.format(64),
    ),
    "an odd number of microbatches in groups of two": (
        f"{P2_V3} {BATCH.format(96)}",
        4,
        "3 microbatches a step (train.global_batch=96 / train.micro_batch=16 / 2 data-parallel ranks) leave a last "
        "group of 1 after groups of pipeline.microbatch_group=2; the schedule wants none or at least "
        "parallel.pipeline=2: set train.global_batch=64, or pipeline.microbatch_group=3",
        "pipeline.microbatch_group=3",
    ),
    "no time to wait": (f"{P2} pipeline.timeout=0", 2, "pipeline.timeout=0.0 must be above 0", "pipeline.timeout=null"),
    "a negative group": (
        f"{P2_V3} pipeline.microbatch_group=-2",
        2,
        "pipeline.microbatch_group=-2 must be above 0",
        "pipeline.microbatch_group=null",
    ),
    "no stages": (f"{P2} parallel.pipeline=0", 2, "parallel.pipeline=0 must be above 0", P2),
    "no chunks": (
        f"{P2} parallel.virtual_pipeline=0",
        2,
        "parallel.virtual_pipeline=0 must be above 0",
        "parallel.virtual_pipeline=1",
    ),
    "processes that do not make whole pipelines": (
        f"parallel.tensor=2 {P2}",
        6,
        "6 processes cannot hold parallel.tensor=2 x parallel.pipeline=2 = 4 ranks a model copy; start a multiple of 4",
        "parallel.tensor=1 train.global_batch=96",
    ),
}

PASSED: list[tuple[str, int]] = [
    (P2, 2),
    (f"{P2} parallel.virtual_pipeline=1", 2),
    (f"{P3} {BATCH.format(48)}", 3),
    (f"{P2} {BATCH.format(64)}", 4),
    (f"parallel.pipeline=6 {BATCH.format(96)}", 6),
    (f"{P2} pipeline.blocks_per_chunk=[2,4]", 2),
    (f"{P2} pipeline.timeout=0.5", 2),
    (f"{P2} pipeline.history_cache=false pipeline.check_headers=true", 2),
    (f"{P2} parallel.tensor=2 parallel.sequence=true", 4),
    (P2_V3, 2),
    (f"{P2_V3} pipeline.overlap_p2p=true", 2),
    (f"{P2_V3} pipeline.blocks_per_chunk=[1,1,1,1,1,1]", 2),
    (f"{P2_V3} pipeline.microbatch_group=3 {BATCH.format(80)}", 2),  # groups of 3 and 2
    (f"{P2_V3} pipeline.microbatch_group=5 {BATCH.format(80)}", 2),
    (f"{P3} parallel.virtual_pipeline=2 {BATCH.format(80)} pipeline.microbatch_group=5", 3),
    ("parallel.pipeline=1 pipeline.history_cache=false", 1),
]


def run_of(words: str) -> RunConfig:
    return load_run(SAMPLE, words.split())


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_and_the_advice_works(name: str) -> None:
    """The numbers of both sides are in the message, and what it proposes passes (where it leaves the choice: one of
    several)."""
    words, world_size, message, advice = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(message)) as refusal:
        check_run(run_of(words), world_size)
    if not message.endswith(("must be above 0", "start a multiple of 4")):
        said = str(refusal.value).replace(", ", ",")
        assert not [word for word in advice.split() if word not in said]
    check_run(run_of(f"{words} {advice}"), world_size)


@pytest.mark.parametrize(("words", "world_size"), PASSED, ids=[words for words, _ in PASSED])
def test_what_can_run_passes(words: str, world_size: int) -> None:
    """Every way to say where blocks and microbatches go."""
    check_run(run_of(words), world_size)


def test_blocks_lie_where_the_settings_say() -> None:
    """Evenly, or by the list."""
    assert layout_of(run_of(P2_V3)).starts == (0, 1, 2, 3, 4, 5, 6)
    assert layout_of(run_of(f"{P2} pipeline.blocks_per_chunk=[2,4]")).starts == (0, 2, 6)


def test_a_group_is_as_many_microbatches_as_stages_unless_it_is_given() -> None:
    """Megatron-Core's own default."""
    assert microbatch_group(run_of(f"{P3} parallel.virtual_pipeline=2")) == 3
    assert microbatch_group(run_of(f"{P2_V3} pipeline.microbatch_group=5")) == 5


def test_a_ranks_share_follows_the_layout() -> None:
    """The sequence is divided only where there are several tensor-parallel ranks to divide it."""
    assert local_share(run_of(P2)) == Local(128, 16, 1, False)
    assert local_share(run_of(f"{P2} parallel.sequence=true")) == Local(128, 16, 1, False)
    assert local_share(run_of(f"{P2} parallel=tp2_sp train.micro_batch=8")) == Local(128, 8, 2, True)
