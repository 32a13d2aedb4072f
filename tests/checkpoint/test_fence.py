"""A process of an attempt that has lost its run folder to the next one writes nothing more into it."""

import json
import os
from pathlib import Path

import pytest

from depthbench.checkpoint import store
from depthbench.checkpoint.fence import VARIABLE, Fence, SupersededError, claim, owner
from depthbench.checkpoint.folder import published, remove_remnants
from depthbench.training.status import write_status
from depthbench.training.trainer import train
from tests.corpora import Corpus, snapshot, trainable_run
from tests.harness import defer_world, start_workers


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
    from depthbench.training.trainer import Trainer

    defer_world(rank, world_size, store)
    os.environ[VARIABLE] = "7.0"
    place = {"start": "__init__", "step": "report", "save": "_save"}[lose_at]
    method = getattr(Trainer, place)

    def changed(self: Trainer, *args: object) -> object:
        if lose_at == "start" or self.step == 4:
            claim(folder, "7.1")
        return method(self, *args)

    setattr(Trainer, place, changed)
    return train(run)  # type: ignore[arg-type]


@pytest.mark.parametrize("lose_at", ["start", "step", "save"])
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
    assert steps == {"start": [], "step": [1, 2, 3], "save": [1, 2, 3, 4]}[lose_at]
    saved = [checkpoint.step for checkpoint in published(folder / "checkpoints")]
    assert saved == ([] if lose_at == "start" else [2]) or (mode == "async" and not saved)  # may still be written
    assert not (folder / "status.json").exists() or json.loads((folder / "status.json").read_text())["step"] == 0


def test_a_save_in_progress_is_not_published_after_the_next_attempt_began(tmp_path: Path) -> None:
    """What the survivor would rename is gone, in one step: it cannot publish half of it."""
    writing = tmp_path / ".saving-step_00000004-abc"
    writing.mkdir()
    (writing / "data").write_text("x")
    remove_remnants(tmp_path)
    with pytest.raises(FileNotFoundError):
        store.os.rename(writing, tmp_path / "step_00000004")
    assert snapshot(tmp_path) == {}
