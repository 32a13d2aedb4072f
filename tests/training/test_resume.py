"""A run that was stopped, signalled or killed goes on as if nothing had happened, bit by bit."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from depthbench.checkpoint import store as store_module
from depthbench.checkpoint.folder import latest
from depthbench.config.schema import RunConfig
from depthbench.training import trainer as trainer_module
from depthbench.training.trainer import Trainer, train
from tests.checkpoint.reading import differing, read_checkpoint
from tests.corpora import Corpus, snapshot, trainable_run
from tests.harness import defer_world, run_workers, start_workers

STEPS = 8
EXACT = ("loss", "grad_norm", "lr", "tokens", "skipped", "eval/loss")


def training(
    rank: int, world_size: int, store: str, run: RunConfig, before: Callable[[int], None] | None = None
) -> int:
    """`depthbench train`; `before` may tamper with this process first."""
    defer_world(rank, world_size, store)
    if before:
        before(rank)
    return train(run)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def exact(folder: Path) -> list[dict[str, Any]]:
    """What must not depend on interruptions, by step."""
    return [{"step": line["step"], **{k: line[k] for k in EXACT if k in line}} for line in lines(folder)]


def status(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return content


def tensorboard_steps(folder: Path) -> list[int]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Scalars("train/loss")]


def assert_same_run(resumed: Path, whole: Path, last: int = STEPS) -> None:
    """Losses, norms, rates and validation of every step, and every tensor of the last checkpoint."""
    assert exact(resumed) == exact(whole)
    assert [line["step"] for line in lines(resumed)] == list(range(1, last + 1))
    assert tensorboard_steps(resumed) == list(range(1, last + 1))
    one, other = latest(resumed / "checkpoints"), latest(whole / "checkpoints")
    assert one and other and one.step == other.step == last
    assert not differing(read_checkpoint(one.path), read_checkpoint(other.path))


SHARDED = {
    "distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 5000,
}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32": (1, {}),
    "reference_hc": (1, {"train": {"precision": "reference"}, "residual": {"architecture": "hc"}}),
    "bf16_dp2_sharded_async_workers": (
        2,
        {
            "parallel": SHARDED,
            "train": {"precision": "bf16"},
            "checkpoint": {"mode": "async"},
            "data": {"workers": 2},
        },
    ),
    "bf16_tp2_sp_moda": (
        2,
        {
            "parallel": {"tensor": 2, "sequence": True, "distributed_optimizer": True},
            "train": {"precision": "bf16"},
            "residual": {"architecture": "moda"},
        },
    ),
    "bf16_pp2_vp2_attnres": (
        2,
        {
            "model": {"num_layers": 4},
            "parallel": {"pipeline": 2, "virtual_pipeline": 2, "distributed_optimizer": True},
            "pipeline": {"overlap_p2p": True},
            "train": {"precision": "bf16"},
            "residual": {"architecture": "block_attnres", "sublayers_per_block": 3},
        },
    ),
}


def run_of(corpus: Corpus, folder: Path, kind: str, **train_settings: Any) -> tuple[int, RunConfig]:
    world_size, sections = KINDS[kind]
    settings = {**sections.get("train", {}), "steps": STEPS, "eval_every": 4, **train_settings}
    return world_size, trainable_run(corpus, folder, **{**sections, "train": settings})


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_and_resumed_is_bit_equal(corpus: Corpus, tmp_path: Path, kind: str) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    world_size, run = run_of(corpus, whole, kind)
    assert run_workers(world_size, training, run) == [0] * world_size
    assert status(whole) == {"state": "finished", "step": STEPS, "reason": ""}
    for stop in (3, 5, None):
        world_size, run = run_of(corpus, resumed, kind, stop_at=stop)
        assert run_workers(world_size, training, run) == [0] * world_size
        assert status(resumed)["state"] == ("stopped" if stop else "finished")
    assert_same_run(resumed, whole)


def signal_before_update(at_step: int, victim: int, send: Callable[[], None]) -> Callable[[int], None]:
    def before(rank: int) -> None:
        update = Trainer._update

        def signalled(self: Trainer, microbatches: list[Any]) -> dict[str, float]:
            if rank == victim and self.step == at_step:
                send()
            return update(self, microbatches)

        Trainer._update = signalled  # type: ignore[method-assign]

    return before


def signal_in_evaluation(number: int, victim: int) -> Callable[[int], None]:
    def before(rank: int) -> None:
        evaluate = trainer_module.evaluate

        def signalled(*args: Any) -> Any:
            if rank == victim:
                os.kill(os.getpid(), number)
            return evaluate(*args)

        trainer_module.evaluate = signalled  # type: ignore[assignment]

    return before


def to_rank() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def to_its_whole_process_group() -> None:
    """As a scheduler does: the rank, its data loaders and the helpers of its checkpoints."""
    os.killpg(0, signal.SIGTERM)


@pytest.mark.parametrize("kind", ["bf16_dp2_sharded_async_workers", "bf16_pp2_vp2_attnres"])
@pytest.mark.parametrize("send", [to_rank, to_its_whole_process_group])
def test_a_signal_to_one_rank_stops_all_at_one_step(
    corpus: Corpus, tmp_path: Path, send: Callable[[], None], kind: str
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    world_size, run = run_of(corpus, whole, kind)
    run_workers(world_size, training, run)
    world_size, run = run_of(corpus, resumed, kind)
    assert run_workers(world_size, training, run, signal_before_update(4, victim=1, send=send)) == [0, 0]
    assert status(resumed) == {"state": "stopped", "step": 5, "reason": "SIGTERM"}
    found = latest(resumed / "checkpoints")
    assert found and found.step == 5
    assert run_workers(world_size, training, run) == [0, 0]
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_during_evaluation_does_not_wait_for_its_end(
    corpus: Corpus, tmp_path: Path, number: signal.Signals
) -> None:
    _, run = run_of(corpus, tmp_path, "fp32", eval_sequences=64, micro_batch=1, eval_every=3)
    assert run_workers(2, training, run, signal_in_evaluation(number, victim=1)) == [0, 0]
    assert status(tmp_path) == {"state": "stopped", "step": 3, "reason": number.name}
    assert "eval/loss" not in lines(tmp_path)[-1]
    assert run_workers(2, training, run) == [0, 0]
    assert status(tmp_path)["state"] == "finished"


def kill(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_before_manifest(rank: int) -> None:
    store_module._write_durably = kill


def killed_before_renaming(rank: int) -> None:
    store_module.os.rename = kill


def killed_while_writing(rank: int) -> None:
    """The whole process group dies while the data files are being written: the first of them is open."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._write_item = lambda *args, **kwargs: os.killpg(0, signal.SIGKILL)


def killed_while_the_writer_works(rank: int) -> None:
    """Async: the trainer dies just after it has forked the writer, which goes on alone."""
    queue = store_module.AsyncCallsQueue
    schedule = queue.schedule_async_request

    def schedule_and_die(self: Any, request: Any) -> None:
        schedule(self, request)
        kill()

    queue.schedule_async_request = schedule_and_die


def only_at(step: int, tamper: Callable[[int], None]) -> Callable[[int], None]:
    """Tamper when step `step` is to be saved; the saves before it work."""

    def before(rank: int) -> None:
        save = Trainer._save

        def tampered(self: Trainer) -> None:
            if self.step == step:
                tamper(rank)
            save(self)

        Trainer._save = tampered  # type: ignore[method-assign]

    return before


@pytest.mark.parametrize(
    ("mode", "tamper"),
    [
        ("sync", killed_while_writing),
        ("sync", killed_before_manifest),
        ("sync", killed_before_renaming),
        ("async", killed_before_manifest),
        ("async", killed_while_the_writer_works),
    ],
)
def test_killed_while_saving(corpus: Corpus, tmp_path: Path, mode: str, tamper: Callable[[int], None]) -> None:
    """`kill -9` in the middle of a save loses that save alone; the run goes on from the one before, bit by bit."""
    sections: dict[str, Any] = {"checkpoint": {"mode": mode, "every": 2}, "train": {"steps": STEPS, "eval_every": 4}}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_workers(1, training, trainable_run(corpus, whole, **sections))
    run = trainable_run(corpus, resumed, **sections)
    codes, _, _ = start_workers(1, training, run, only_at(6, tamper))
    assert codes == [-signal.SIGKILL]
    left = latest(resumed / "checkpoints")
    assert left and (left.step == 4 or (mode == "async" and left.step == 2))  # async: 4 may have been in flight
    assert run_workers(1, training, run) == [0]
    assert not list((resumed / "checkpoints").glob(".saving*"))
    assert_same_run(resumed, whole)


def dies_before_its_last_word(rank: int) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Trainer.leave = die  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(("first", "then"), [("tp2", "one"), ("one", "tp2"), ("one", "dp2"), ("dp2", "tp2")])
def test_resumed_under_another_layout(corpus: Corpus, tmp_path: Path, first: str, then: str) -> None:
    """Within rounding of the run that never changed its layout: moments came along."""
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "tp2": (2, {"parallel": {"tensor": 2, "sequence": True}}),
        "dp2": (2, {"parallel": SHARDED}),
    }

    def run(folder: str, layout: str, stop: int | None) -> None:
        world_size, sections = layouts[layout]
        settings = {"steps": STEPS, "eval_every": 4, "stop_at": stop}
        run_workers(world_size, training, trainable_run(corpus, tmp_path / folder, train=settings, **sections))

    run("whole", "one", None)
    run("changed", first, 4)
    run("changed", then, None)
    for ours, theirs in zip(exact(tmp_path / "changed"), exact(tmp_path / "whole"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_killed_after_its_last_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    """Nothing is left to train; the next start says the last word that it could not."""
    for steps in (STEPS - 2, STEPS):
        _, run = run_of(corpus, tmp_path, "fp32", stop_at=steps)
        codes, _, _ = start_workers(1, training, run, dies_before_its_last_word)
        assert codes == [-signal.SIGKILL] and status(tmp_path)["state"] == "running"
        assert run_workers(1, training, run) == [0]
        stopped = {"state": "stopped", "step": steps, "reason": f"train.stop_at={steps}"}
        assert status(tmp_path) == (stopped if steps < STEPS else {"state": "finished", "step": steps, "reason": ""})


def test_a_finished_run_does_nothing_and_a_longer_one_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    _, run = run_of(corpus, tmp_path, "fp32")
    run_workers(1, training, run)
    before = snapshot(tmp_path)
    assert run_workers(2, training, run) == [0, 0]
    assert snapshot(tmp_path) == before
    _, longer = run_of(corpus, tmp_path, "fp32", steps=STEPS + 2)
    assert run_workers(1, training, longer) == [0]
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, STEPS + 3))
    assert (tmp_path / f"run.until-step-{STEPS}.yaml").is_file()
