"""A process of an attempt that has lost its run folder to the next one writes nothing more into it."""

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from depthbench.checkpoint.fence import VARIABLE, Fence, SupersededError, claim, owner
from depthbench.checkpoint.folder import folder_name, published, remove_remnants
from depthbench.checkpoint.store import CheckpointWriter
from depthbench.config.schema import CheckpointConfig, CheckpointMode
from depthbench.training.status import write_status
from depthbench.training.trainer import train
from tests.corpora import Corpus, trainable_run
from tests.harness import defer_world, join_world, run_workers, start_workers


def test_the_last_to_claim_a_folder_owns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert owner(tmp_path) is None
    monkeypatch.setenv(VARIABLE, "7.0")
    claim(tmp_path, "7.0")
    Fence(tmp_path).check()
    claim(tmp_path, "7.1")
    assert owner(tmp_path) == "7.1"
    with pytest.raises(SupersededError, match=r"attempt 7\.0 no longer owns .*: attempt 7\.1 does"):
        Fence(tmp_path).check()


def test_without_a_launcher_there_is_no_fence(tmp_path: Path) -> None:
    claim(tmp_path, "7.1")
    Fence(tmp_path).check()


def test_the_status_is_the_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path, "7.1")
    monkeypatch.setenv(VARIABLE, "7.1")
    write_status(tmp_path, "running", 3)
    told = {"state": "running", "step": 3, "reason": "", "attempt": "7.1"}
    assert json.loads((tmp_path / "status.json").read_text()) == told
    monkeypatch.setenv(VARIABLE, "7.0")
    with pytest.raises(SupersededError):
        write_status(tmp_path, "failed", 2, "peer closed")
    assert json.loads((tmp_path / "status.json").read_text()) == told


def training(rank: int, world_size: int, store: str, run: "object", lose_at: str, folder: Path) -> int:
    """Train as attempt 7.0; the folder changes hands when `lose_at` comes."""
    from depthbench.training import trainer
    from depthbench.training.trainer import Trainer

    defer_world(rank, world_size, store)
    os.environ[VARIABLE] = "7.0"
    if lose_at == "loading":
        last_loaded = trainer.SpikeGuard

        def loaded(*args: Any) -> Any:
            claim(folder, "7.1")
            (folder / "metrics.jsonl").write_text('{"step": 1}\n')
            return last_loaded(*args)

        trainer.SpikeGuard = loaded  # type: ignore[assignment,misc]
        return train(run)  # type: ignore[arg-type]
    place = {"start": "__init__", "step": "report", "save": "_save"}[lose_at]
    method = getattr(Trainer, place)

    def changed(self: Trainer, *args: object) -> object:
        if lose_at == "start" or self.step == 4:
            claim(folder, "7.1")
        return method(self, *args)

    setattr(Trainer, place, changed)
    return train(run)  # type: ignore[arg-type]


@pytest.mark.parametrize("lose_at", ["start", "loading", "step", "save"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_superseded_trainer_leaves_the_folder_as_it_is(
    corpus: Corpus, tmp_path: Path, lose_at: str, mode: str
) -> None:
    """No metrics, checkpoint or status after the change, and an error that says why."""
    folder = tmp_path / "run"
    folder.mkdir()
    run = trainable_run(corpus, folder, checkpoint={"every": 2, "mode": mode}, train={"steps": 8, "eval_every": 0})
    claim(folder, "7.0")
    codes, said, _ = start_workers(1, training, run, lose_at, folder)
    assert codes == [1] and "attempt 7.0 no longer owns" in said
    metrics = folder / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    assert steps == {"start": [], "loading": [1], "step": [1, 2, 3], "save": [1, 2, 3, 4]}[lose_at]
    saved = [checkpoint.step for checkpoint in published(folder / "checkpoints")]
    assert saved == ([] if lose_at in ("start", "loading") else [2]) or (
        mode == "async" and not saved
    )  # may still be written
    assert not (folder / "status.json").exists() or json.loads((folder / "status.json").read_text())["step"] == 0


def next_attempt(folder: Path) -> None:
    """It claims the folder, and clears it up."""
    claim(folder, "7.1")
    remove_remnants(folder / "checkpoints")


def a_checkpoint(folder: Path, step: int = 4, complete: bool = True) -> None:
    """One that another process has put there."""
    path = folder / "checkpoints" / folder_name(step)
    path.mkdir()
    (path / "theirs").touch()
    if complete:
        (path / "manifest.json").write_text("{}")


def next_attempt_that_got_there(folder: Path) -> None:
    claim(folder, "7.1")
    a_checkpoint(folder)


def saving(
    rank: int, world_size: int, store: str, folder: Path, mode: CheckpointMode, looks: int, then: Callable[[Path], None]
) -> str:
    """Save steps 2 and 4 as attempt 7.0, and keep one. `then` happens in the second save, after so many looks whether
    the folder is still this attempt's. Returns what it ended with."""
    join_world(rank, world_size, store)
    os.environ[VARIABLE] = "7.0"
    writer = CheckpointWriter(folder / "checkpoints", CheckpointConfig(mode=mode, keep=1), lambda text: None)
    tensors = [ShardedTensor.from_rank_offsets("weights", torch.arange(4.0))]
    writer.save(2, tensors, {})
    writer.close()
    look, looked = Fence.check, itertools.count(1)

    def check(self: Fence) -> None:
        look(self)
        if next(looked) == looks:
            then(folder)

    Fence.check = check  # type: ignore[method-assign]
    if not looks:
        then(folder)
    try:
        writer.save(4, tensors, {})
        writer.close()
    except (SupersededError, FileNotFoundError) as error:
        return type(error).__name__
    return ""


CHANGES: dict[str, tuple[int, Callable[[Path], None], str, list[int]]] = {
    # how often it may look before it happens; what happens; what the save ends with; which checkpoints there are then
    "before it is published": (0, next_attempt, "SupersededError", [2]),
    "the next attempt began after the look": (1, next_attempt, "FileNotFoundError", [2]),
    "the next attempt has published that step": (1, next_attempt_that_got_there, "SupersededError", [2, 4]),
    "before old ones are deleted": (1, lambda folder: claim(folder, "7.1"), "SupersededError", [2, 4]),
    "not at all, a survivor has published it": (1, a_checkpoint, "", [4]),
    "not at all, remnants are in the way": (1, lambda folder: a_checkpoint(folder, complete=False), "", [4]),
}


@pytest.mark.parametrize("mode", list(CheckpointMode))
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_save_while_the_folder_changes_hands(tmp_path: Path, mode: CheckpointMode, change: str) -> None:
    """A survivor publishes a whole checkpoint or none, and removes none of the next attempt's."""
    looks, then, ends_with, steps = CHANGES[change]
    claim(tmp_path, "7.0")
    assert run_workers(1, saving, tmp_path, mode, looks, then) == [ends_with]
    there = published(tmp_path / "checkpoints")
    assert [checkpoint.step for checkpoint in there] == steps
    theirs = steps[-1] == 4 and then in (next_attempt_that_got_there, a_checkpoint)
    assert (there[-1].path / "theirs").exists() == theirs
    assert theirs or (there[-1].path / ".metadata").exists()
