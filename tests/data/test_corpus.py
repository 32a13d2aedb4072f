"""Windows of corpora: each once an epoch, in an order that nothing but the seed and the data decides."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

from depthbench.config.schema import DataConfig, DataSource, RunConfig
from depthbench.data.corpus import EpochedCorpus, WindowSettings, blend, corpora, documents_of, samples_from_each
from depthbench.data.loader import Batch, SampleOrder, batches
from depthbench.errors import UserError
from depthbench.training import trainer
from tests.corpora import Corpus, snapshot, trainable_run, write_counting, write_documents
from tests.harness import defer_world, join_world, run_workers

LENGTH = 8
LENGTHS = [31, 5, 1, 12, 20, 8, 9, 3]  # 89 tokens, 11 windows an epoch
EPOCH = 11


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_counting(tmp_path / "counting", LENGTHS)


def opened(prefix: str, cache: Path, seed: int = 3, built: int = 3 * EPOCH, **changes: Any) -> EpochedCorpus:
    """The corpus as a process that has just started sees it."""
    settings = WindowSettings(
        **{"sequence_length": LENGTH, "vocab_size": 1000, "eod": 0, "seed": seed, "index_cache": cache, **changes}
    )
    found = EpochedCorpus(prefix, documents_of(prefix, 0.0)[0], Split.train, settings)
    if built:
        found.build_index(built)
    return found


def window(sample: Batch) -> list[int]:
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert bool((sample["loss_mask"] == 1).all())
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


# -- epochs -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stops", [[], [4], [EPOCH], [EPOCH, 2 * EPOCH], [3, 4, EPOCH + 1], [2 * EPOCH - 1]], ids=str)
def test_each_window_once_an_epoch(prefix: str, tmp_path: Path, stops: list[int]) -> None:
    """Also where a run was stopped in the middle of an epoch, or at its very end."""
    read: list[list[int]] = []
    for start, end in pairwise([0, *stops, 3 * EPOCH]):
        again = opened(prefix, tmp_path / "cache")
        read += [window(again[number]) for number in range(start, end)]
    assert read == [window(opened(prefix, tmp_path / "whole")[number]) for number in range(3 * EPOCH)]
    assert opened(prefix, tmp_path / "cache").samples_per_epoch == EPOCH
    for epoch in range(3):
        windows = read[epoch * EPOCH : (epoch + 1) * EPOCH]
        inputs = [token for found in windows for token in found[:-1]]
        assert len(set(inputs)) == EPOCH * LENGTH  # all tokens differ, so no window is there twice or overlaps another


def test_epochs_differ_in_order_alone(prefix: str, tmp_path: Path) -> None:
    found = opened(prefix, tmp_path / "cache")
    epochs = [found._epoch(number, found._cache) for number in range(3)]
    orders = [tuple(epoch.document_index.tolist()) for epoch in epochs]
    assert len(set(orders)) == 3
    for epoch, order in zip(epochs, orders, strict=True):
        assert sorted(order) == list(range(len(LENGTHS)))
        assert sorted(epoch.shuffle_index.tolist()) == list(range(EPOCH))
        # laid end to end in that order and cut, the documents are the windows
        text = np.concatenate([found.indexed[number] for number in order])
        expected = sorted(text[n * LENGTH : (n + 1) * LENGTH + 1].tolist() for n in range(EPOCH))
        assert sorted(window(epoch[number]) for number in range(EPOCH)) == expected


def test_the_seed_decides_the_order(prefix: str, tmp_path: Path) -> None:
    first, second = (opened(prefix, tmp_path / "cache", seed=seed) for seed in (3, 30))
    again = opened(prefix, tmp_path / "elsewhere", seed=3)
    order = [window(first[number]) for number in range(EPOCH)]
    assert order != [window(second[number]) for number in range(EPOCH)]
    assert order == [window(again[number]) for number in range(EPOCH)]


def test_a_longer_run_continues_the_same_order(prefix: str, tmp_path: Path) -> None:
    short, long = opened(prefix, tmp_path / "a", built=5), opened(prefix, tmp_path / "b", built=3 * EPOCH)
    assert [window(short[number]) for number in range(5)] == [window(long[number]) for number in range(5)]


# -- batches ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dp_size", "micro_batch", "stops", "workers"),
    [
        (1, 4, [], 0),
        (2, 2, [], 0),
        (4, 1, [], 0),
        (2, 1, [8], 0),
        (4, 1, [4, 12], 0),
        (1, 2, [4, 8, 12, 16], 0),
        (2, 2, [], 2),
        (1, 1, [8], 2),
    ],
)
def test_the_sequence_of_samples_depends_on_no_layout(
    prefix: str, tmp_path: Path, dp_size: int, micro_batch: int, stops: list[int], workers: int
) -> None:
    """Six steps of four samples over two epochs, put together microbatch by microbatch and rank by rank."""
    plain = opened(prefix, tmp_path / "plain")
    expected = [window(plain[number]) for number in range(24)]
    read: list[list[int]] = []
    for start, end in pairwise([0, *stops, 24]):
        ranks: list[Iterator[Batch]] = []
        for dp_rank in range(dp_size):
            order = SampleOrder(start, end, micro_batch, dp_rank, dp_size)
            assert len(order) == len(list(order))
            ranks.append(batches(opened(prefix, tmp_path / "cache"), order, workers))
        for together in zip(*ranks, strict=True):
            for batch in together:
                assert set(batch) == {"tokens", "labels", "loss_mask"}
                read += [window({name: batch[name][i] for name in batch}) for i in range(micro_batch)]
    assert read == expected


def recorded(rank: int, world_size: int, store: str, run: RunConfig) -> list[list[list[int]]]:
    """Train, and return the windows of each step that this rank read."""
    defer_world(rank, world_size, store)
    steps: list[list[list[int]]] = []

    class Recorded(trainer.Trainer):
        def _update(self, microbatches: list[Batch]) -> dict[str, float]:
            items = [{n: batch[n][i] for n in batch} for batch in microbatches for i in range(len(batch["tokens"]))]
            steps.append([window(item) for item in items])
            return super()._update(microbatches)

    trainer.Trainer = Recorded  # type: ignore[misc]
    assert trainer.train(run) == 0
    return steps


def test_the_trainer_reads_each_window_once(corpus: Corpus, tmp_path: Path) -> None:
    """Epochs of six windows, steps of two: stopped in an epoch, then at the very end of one; then a longer run; on two
    ranks, then on one. The same samples at each step as in a run without a stop."""
    counting = write_counting(tmp_path / "counting", [60, 40, 70, 23])  # 193 tokens
    sections: dict[str, Any] = {
        "data": {"train": [{"prefix": counting}]},
        "model": {"num_layers": 1},
    }

    def train(folder: str, world_size: int, **train: int) -> list[list[list[int]]]:
        shape = {"global_batch": 2, "micro_batch": 1, "eval_every": 0}
        run = trainable_run(corpus, tmp_path / folder, **sections, train={**shape, **train})
        ranks = run_workers(world_size, recorded, run)
        return [[found for part in step for found in part] for step in zip(*ranks, strict=True)]

    whole = train("whole", 1, steps=9)
    parts = [
        train("parts", 2, steps=6, stop_at=1),
        train("parts", 1, steps=6, stop_at=3),
        train("parts", 2, steps=6),
        train("parts", 1, steps=9),
    ]
    assert [len(part) for part in parts] == [1, 2, 3, 3]
    assert [step for part in parts for step in part] == whole
    for epoch in range(3):
        windows = [found for step in whole[3 * epoch : 3 * epoch + 3] for found in step]
        assert len({token for found in windows for token in found[:-1]}) == 192


# -- blends -----------------------------------------------------------------------------------------------------------
def test_blends_keep_their_weights_and_are_stable(tmp_path: Path) -> None:
    sources = [
        DataSource(write_counting(tmp_path / f"c{i}", LENGTHS, 100 * i), w) for i, w in enumerate((5.0, 3.0, 2.0))
    ]
    settings = WindowSettings(LENGTH, 1000, 0, 3, tmp_path / "cache")
    parts, weights = corpora(DataConfig(sources, "none"), Split.train, settings)
    for part in parts:
        part.build_index(3 * EPOCH)
    short, long = blend(parts, weights, 20), blend(parts, weights, 60)
    read = [window(long[number]) for number in range(60)]
    assert read[:20] == [window(short[number]) for number in range(20)]
    origin = np.array([found[0] // 100 for found in read])
    for count in range(1, 61):
        drawn = [(origin[:count] == number).sum() for number in range(3)]
        assert all(abs(n - count * weight / 10) < 1 for n, weight in zip(drawn, weights, strict=True)), (count, drawn)
        assert all(n <= enough for n, enough in zip(drawn, samples_from_each(weights, count), strict=True))
    for number, part in enumerate(parts):  # and each corpus gives its samples in its own order
        own = [found for found in read if found[0] // 100 == number]
        assert own == [window(part[i]) for i in range(len(own))]


def test_a_blend_of_one_is_the_corpus(prefix: str, tmp_path: Path) -> None:
    found = opened(prefix, tmp_path / "cache")
    assert blend([found], [0.3], 100) is found


# -- the cache of sample indices --------------------------------------------------------------------------------------
def test_built_once(prefix: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    opened(prefix, cache, built=2 * EPOCH)
    files = {path: path.stat() for path in cache.rglob("*") if path.is_file()}
    opened(prefix, cache, built=2 * EPOCH)
    opened(prefix, cache, built=1)
    again = {path: path.stat() for path in cache.rglob("*") if path.is_file()}
    assert {p: (s.st_ino, s.st_mtime_ns) for p, s in files.items()} == {
        p: (s.st_ino, s.st_mtime_ns) for p, s in again.items()
    }
    opened(prefix, cache, built=2 * EPOCH + 1)  # one epoch more
    assert set(files) < {path for path in cache.rglob("*") if path.is_file()}


def die_at(module: Any, name: str, call: int) -> None:
    """From call number `call` on of `module.name`, the process ends as if it were killed."""
    original, calls = getattr(module, name), 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os._exit(9)
        return original(*args, **options)

    setattr(module, name, dying)


@pytest.mark.parametrize(
    ("module", "name", "call", "published"), [(np, "save", 2, 0), (np, "save", 5, 4), (os, "replace", 3, 2)]
)
def test_a_builder_that_is_killed_leaves_no_half_file(
    prefix: str, tmp_path: Path, module: Any, name: str, call: int, published: int
) -> None:
    """While it writes the first epoch, while it writes the second, while it publishes."""
    cache = tmp_path / "cache"

    def build() -> None:
        die_at(module, name, call)
        opened(prefix, cache, built=2 * EPOCH)

    process = multiprocessing.get_context("fork").Process(target=build)
    process.start()
    process.join()
    assert process.exitcode == 9
    whole = opened(prefix, tmp_path / "whole", built=2 * EPOCH)
    good = snapshot(whole._cache)
    (folder,) = cache.iterdir()
    visible = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".npy", ".txt")}
    assert len(visible) == published
    assert visible.items() <= good.items()
    again = opened(prefix, cache, built=2 * EPOCH)
    assert good.items() <= snapshot(folder).items()
    assert [window(again[n]) for n in range(2 * EPOCH)] == [window(whole[n]) for n in range(2 * EPOCH)]


def test_a_builder_that_fails_leaves_nothing(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(prefix, tmp_path / "cache", built=0)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *args, **options: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            found.build_index(1)
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    found.build_index(1)
    assert len(window(found[0])) == LENGTH + 1


def build_slowly(cache: Path, prefix: str, turn: Barrier) -> list[list[int]]:
    """Stop in the middle of the first file, while another process builds the same and reads it."""
    original, first = np.save, True

    def save(path: str, *args: Any, **options: Any) -> None:
        nonlocal first
        if first:
            first = False
            turn.wait(30)  # the other builds
            turn.wait(30)
            Path(path).write_bytes(b"half a file")
            turn.wait(30)  # the other reads
            turn.wait(30)
        original(path, *args, **options)

    np.save = save  # type: ignore[assignment]
    opened(prefix, cache)
    return []


def build_and_read(cache: Path, prefix: str, turn: Barrier) -> list[list[int]]:
    turn.wait(30)
    opened(prefix, cache)
    turn.wait(30)
    turn.wait(30)
    found = opened(prefix, cache)
    read = [window(found[number]) for number in range(3 * EPOCH)]
    turn.wait(30)
    return read


def build_at_once(rank: int, world_size: int, store: str, *args: Any) -> list[list[int]]:
    return build_and_read(*args) if rank else build_slowly(*args)


def test_two_builders_at_once(prefix: str, tmp_path: Path) -> None:
    turn = multiprocessing.get_context("fork").Barrier(2)
    _, read = run_workers(2, build_at_once, tmp_path / "cache", prefix, turn)
    alone = opened(prefix, tmp_path / "alone")
    assert read == [window(alone[number]) for number in range(3 * EPOCH)]
    assert snapshot(next((tmp_path / "cache").iterdir())) == snapshot(alone._cache)


def read_in_a_world(rank: int, world_size: int, store: str, make: Callable[[], EpochedCorpus]) -> list[list[int]]:
    join_world(rank, world_size, store)
    found = make()
    return [window(found[number]) for number in range(2 * EPOCH)]


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "seed": {"seed": 40},
    "length": {"sequence_length": 5},
    "vocabulary": {"vocab_size": 2000},
    "end of document": {"eod": 1},
}


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_read_what_one_process_built(prefix: str, tmp_path: Path, change: str) -> None:
    """Once torch.distributed runs, Megatron lets only rank 0 build: so all must be there, also in a cache that another
    run, of other settings, has filled."""
    cache, settings = tmp_path / "cache", CHANGES[change]
    opened(prefix, cache)
    opened(prefix, cache, **settings)
    files = snapshot(cache)
    ranks = run_workers(2, read_in_a_world, lambda: opened(prefix, cache, built=0, **settings))
    alone = opened(prefix, tmp_path / "alone", **settings)
    assert ranks[0] == ranks[1] == [window(alone[number]) for number in range(2 * EPOCH)]
    assert snapshot(cache) == files  # nobody built


def test_ranks_read_a_split_of_documents_that_another_split_has_too(prefix: str, tmp_path: Path) -> None:
    """The same corpus for training and validation, say to see a model learn it by heart."""
    opened(prefix, tmp_path / "cache")
    settings = WindowSettings(LENGTH, 1000, 0, 3, tmp_path / "cache")

    def valid() -> EpochedCorpus:
        return EpochedCorpus(prefix, documents_of(prefix, 0.0)[0], Split.valid, settings)

    valid().build_index(2 * EPOCH)
    first, second = run_workers(2, read_in_a_world, valid)
    assert first == second


def test_a_rewritten_corpus_does_not_meet_its_old_index(tmp_path: Path) -> None:
    prefix = write_counting(tmp_path / "c", LENGTHS)
    opened(prefix, tmp_path / "cache")
    write_counting(tmp_path / "c", [*LENGTHS[::-1], 40], first=500)  # longer, and other documents
    found = opened(prefix, tmp_path / "cache", built=16)
    assert found.samples_per_epoch == 16
    windows = [window(found[number]) for number in range(16)]
    assert len({token for w in windows for token in w[:-1]}) == 16 * LENGTH
    assert min(min(w) for w in windows) >= 500


# -- splits -----------------------------------------------------------------------------------------------------------
def test_the_last_documents_are_held_out(prefix: str, tmp_path: Path) -> None:
    train, valid = documents_of(prefix, 0.25)
    assert (train.tolist(), valid.tolist()) == ([0, 1, 2, 3, 4, 5], [6, 7])
    settings = WindowSettings(LENGTH, 1000, 0, 3, tmp_path / "cache")
    held = {
        split: corpora(DataConfig([DataSource(prefix)], "none", valid_fraction=0.25), split, settings)[0][0]
        for split in (Split.train, Split.valid)
    }
    for part in held.values():
        part.build_index(1)
    seen = {
        split: {token for n in range(part.samples_per_epoch) for token in window(part[n])}
        for split, part in held.items()
    }
    assert max(seen[Split.train]) < sum(LENGTHS[:6]) <= min(seen[Split.valid])


def test_documents_in_pieces_are_refused(tmp_path: Path) -> None:
    """Megatron's own tools write such with --split-sentences."""
    builder = IndexedDatasetBuilder(f"{tmp_path}/c.bin", dtype=np.int32)
    builder.add_document(torch.arange(20), [12, 8])
    builder.add_document(torch.arange(13), [13])
    builder.finalize(f"{tmp_path}/c.idx")
    with pytest.raises(UserError, match=r"c has 2 documents in 3 sequences .* one sequence a document"):
        documents_of(f"{tmp_path}/c", 0.0)


def test_a_split_that_is_too_small(tmp_path: Path) -> None:
    settings = WindowSettings(LENGTH, 1000, 0, 3, tmp_path / "cache")
    prefix = write_counting(tmp_path / "c", [5, 3])
    with pytest.raises(UserError, match=r"train split of .*/c has 8 tokens in 2 documents.*sequence_length=8 \+ 1"):
        corpora(DataConfig([DataSource(prefix)], "none"), Split.train, settings)
    with pytest.raises(UserError, match=r"c has 2 documents: data.valid_fraction=0.1 leaves 2 to train on and 0 to"):
        documents_of(prefix, 0.1)
    with pytest.raises(UserError, match=r"c has 2 documents: data.valid_fraction=0.9 leaves 0 to train on and 2 to"):
        documents_of(prefix, 0.9)
    write_documents(tmp_path / "c", [[1] * 9])  # exactly one window
    (found,), _ = corpora(DataConfig([DataSource(prefix)], "none"), Split.train, settings)
    assert found.samples_per_epoch == 1
