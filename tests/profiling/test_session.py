"""Recordings of real runs: what `depthbench profile` and `profile.steps` leave behind, and what they leave alone."""

import argparse
import itertools
import json
import math
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from depthbench.config.load import dump_yaml, plain
from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_run
from depthbench.errors import UserError
from depthbench.planning.cluster import load_cluster
from depthbench.planning.time import predict
from depthbench.profiling import session
from depthbench.profiling.analysis import summarize
from depthbench.profiling.calibrate import calibrate
from depthbench.profiling.clocks import CpuClock, offset_to_rank_0
from depthbench.profiling.command import add_arguments, run
from depthbench.profiling.events import Kind, Recording, load_recording
from depthbench.profiling.planned import EdgeKey
from depthbench.profiling.session import Session
from depthbench.profiling.units import duration
from depthbench.training import trainer as trainer_module
from depthbench.training.step import BatchLoss
from depthbench.training.trainer import PROFILE
from tests.corpora import Corpus, snapshot, trainable_run
from tests.harness import defer_world, join_world, run_workers, start_workers
from tests.profiling.test_trace import assert_nested, count_arrows, of
from tests.training.test_resume import exact, status, training

WARMUP, STEPS, MICROBATCHES, CLUSTER = 1, 2, 4, "h100"
FILES = ["rank-00000.json", "rank-00001.json", "plan.json", "trace.json", "spans.csv", "timeline.png", "report.html"]


def run_of(corpus: Corpus, folder: Path, recorded: list[int] | None = None, **train: Any) -> RunConfig:
    """Two stages of two chunks each."""
    return trainable_run(
        corpus,
        folder,
        model={"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128},
        parallel={"pipeline": 2, "virtual_pipeline": 2},
        train={"steps": 6, "global_batch": 4 * MICROBATCHES, "micro_batch": 4, "eval_every": 0, **train},
        checkpoint={"every": 2},
        profile={"steps": recorded},
        log={"tensorboard": False},
    )


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def profiling(rank: int, world_size: int, store: str, *words: str) -> int:
    """`depthbench profile`."""
    defer_world(rank, world_size, store)
    return command(*words)


def file_of(settings: RunConfig, path: Path) -> str:
    path.write_text(dump_yaml(plain(settings)))
    return str(path)


@dataclass
class Profiled:
    """A run of two steps that was then profiled, with its plan's times of a cluster. before: its checkpoints then.
    sent: by each rank in the recorded steps, bytes over each edge, from its ledger."""

    folder: Path
    settings: RunConfig
    before: dict[str, bytes]
    recording: Recording
    sent: list[dict[EdgeKey, int]]


def noting(rank: int, world_size: int, store: str, *words: str) -> dict[EdgeKey, int]:
    """As `profiling`; what the ledger says of the recorded steps."""
    sent: Counter[EdgeKey] = Counter()
    after = Session.after

    def noted(self: Session, tokens: int) -> None:
        transport = self.recorder.transport
        if self.recording and transport:
            sent.update({edge: traffic.bytes for edge, traffic in transport.ledger.sent.items()})
        after(self, tokens)

    Session.after = noted  # type: ignore[method-assign]
    assert profiling(rank, world_size, store, *words) == 0
    return dict(sent)


@pytest.fixture(scope="module")
def profiled(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("profiled")
    settings = run_of(corpus, folder)
    stopped = replace(settings, train=replace(settings.train, stop_at=2))
    assert run_workers(2, training, stopped) == [0, 0]
    before = snapshot(folder / "checkpoints")
    words = (file_of(settings, folder / "tiny.yaml"), "--warmup", str(WARMUP), "--steps", str(STEPS))
    sent = run_workers(2, noting, *words, "--cluster", CLUSTER)
    return Profiled(folder, settings, before, load_recording(folder / PROFILE), sent)


@pytest.fixture
def copied(profiled: Profiled, tmp_path: Path) -> Path:
    """The recording, to be changed."""
    return Path(shutil.copytree(profiled.folder / PROFILE, tmp_path / "copied"))


def test_a_profile_leaves_its_files_and_no_others(profiled: Profiled) -> None:
    """A rank's file each and what was made of them; the run's checkpoint is as it was, and there is no other."""
    for name in FILES:
        assert (profiled.folder / PROFILE / name).stat().st_size > 0, name
    assert profiled.before and snapshot(profiled.folder / "checkpoints") == profiled.before
    assert not list((profiled.folder / PROFILE / "checkpoints").glob("*"))
    assert status(profiled.folder)["state"] == "stopped"
    assert status(profiled.folder / PROFILE) == {"state": "finished", "step": WARMUP + STEPS + 1, "reason": ""}


def test_the_steps_asked_for_are_recorded(profiled: Profiled) -> None:
    """After the warm-up, from a time of nought, on every rank alike; each span in its step."""
    tokens = 4 * MICROBATCHES * 32
    assert not profiled.recording.missing
    for record in profiled.recording.ranks:
        assert (record.pipeline, record.data, record.tensor) == (record.rank, 0, 0)
        assert record.tokens == [tokens] * STEPS
        steps = {span.step: span for span in record.spans if span.kind is Kind.STEP}
        assert list(steps) == [WARMUP + 1, WARMUP + STEPS]
        for span in record.spans:
            whole = steps[span.step]
            assert 0 <= whole.begin <= span.begin <= span.end <= whole.end
        counts = Counter(span.kind for span in record.spans)
        assert counts[Kind.DATA] == STEPS * MICROBATCHES
        assert counts[Kind.FORWARD] == counts[Kind.BACKWARD] == STEPS * MICROBATCHES * 2


def test_measured_bytes_are_the_planned_ones(profiled: Profiled) -> None:
    """Of every edge, from the plan beside the recording; so for the history cache."""
    plan, ranks = profiled.recording.plan, profiled.recording.ranks
    assert plan and plan["run"]["name"] == "tiny" and plan["run"]["parallel"]["virtual_pipeline"] == 2
    sent: Counter[tuple[int, bool]] = Counter()
    for record in ranks:
        for span in record.spans:
            if span.kind is Kind.SEND:
                sent[span.chunk, span.backward] += span.bytes
    planned = {(max(edge["from"], edge["to"]), edge["direction"] == "backward"): edge for edge in plan["edges"]}
    assert sent == {edge: STEPS * MICROBATCHES * planned[edge]["bytes"] for edge in planned}
    assert [record.cache_bytes for record in ranks] == plan["cache_bytes"]
    summary = summarize(profiled.recording)
    assert len(summary.edges) == 6 and all(edge.as_planned for edge in summary.edges)


def test_the_trace_is_what_was_sent(profiled: Profiled) -> None:
    """The bytes over each edge are those of each rank's ledger; every send has one arrow to its receive, slices nest,
    and what a rank computes is in one row."""
    found = json.loads((profiled.folder / PROFILE / "trace.json").read_text())["traceEvents"]
    error = sum(record.clock_error for record in profiled.recording.ranks)
    slices = of(found, "X")
    assert_nested(slices)
    assert {event["tid"] for event in slices if event["cat"] not in ("send", "receive")} == {0}
    sends, arrows = count_arrows(profiled.recording, found, error)
    assert sends == arrows == STEPS * MICROBATCHES * 2 * 3
    for kind, ranks in (("send", profiled.sent), ("receive", profiled.sent[::-1])):
        shown: list[Counter[EdgeKey]] = [Counter(), Counter()]
        for event in slices:
            if event["cat"] == kind:
                args = event["args"]
                shown[event["pid"]][args["chunk"], args["direction"] == "backward"] += args["bytes"]
        assert shown == ranks  # of two ranks, one receives what the other sends


def test_a_cluster_adds_the_planned_step(profiled: Profiled, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the measured one, in the table and in the report."""
    seconds = predict(profiled.settings, load_cluster(CLUSTER), 2).step
    assert summarize(profiled.recording).planned_step == pytest.approx(1e6 * seconds)
    assert command("--report", str(copied)) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "step, median" in line)
    said = f"planned {duration(1e6 * seconds)}"
    assert said in line and said in (copied / "report.html").read_text()


def test_measured_memory_is_the_planned_one(profiled: Profiled) -> None:
    """Of each stage, within a tenth."""
    assert profiled.recording.plan
    stages = profiled.recording.plan["memory"]["stages"]
    for record in profiled.recording.ranks:
        assert record.memory_bytes == pytest.approx(stages[record.pipeline]["peak"], rel=0.1)


# -- a training job that records some of its steps --------------------------------------------------------------------
def test_recording_changes_nothing_of_a_training(corpus: Corpus, tmp_path: Path) -> None:
    """Losses and norms bit by bit, also after resuming past the recorded steps, which records nothing."""
    whole, recorded = tmp_path / "whole", tmp_path / "recorded"
    assert run_workers(2, training, run_of(corpus, whole)) == [0, 0]
    assert run_workers(2, training, run_of(corpus, recorded, [3, 4], stop_at=5)) == [0, 0]
    found = load_recording(recorded / PROFILE)
    assert {span.step for record in found.ranks for span in record.spans} == {3, 4} and not found.missing
    assert all((recorded / PROFILE / name).is_file() for name in FILES)
    assert [record.memory_bytes for record in found.ranks] == [None, None], "no allocator to ask"
    before = snapshot(recorded / PROFILE)
    assert run_workers(2, training, run_of(corpus, recorded, [3, 4])) == [0, 0]
    assert snapshot(recorded / PROFILE) == before
    assert status(recorded)["state"] == "finished" and exact(recorded) == exact(whole)
    assert not (whole / PROFILE).exists()


def without_a_report(rank: int) -> None:
    def fails(recording: Recording) -> list[Path]:
        raise RuntimeError("no font")

    session.write_outputs = fails


def test_a_training_that_ends_before_its_last_recorded_step_leaves_what_there_was(
    corpus: Corpus, tmp_path: Path
) -> None:
    assert run_workers(2, training, run_of(corpus, tmp_path, recorded=[3, 9], stop_at=4)) == [0, 0]
    assert [step.step for step in summarize(load_recording(tmp_path / PROFILE)).steps] == [3, 4]


# -- ranks that are lost ----------------------------------------------------------------------------------------------
def in_step(number: int, happens: Callable[[BatchLoss], BatchLoss | None]) -> None:
    """To the loss of training step `number`, after its forward and backward passes and before all else."""
    run_microbatches, calls = trainer_module.run_microbatches, itertools.count(1)

    def tampered(*args: Any, **kwargs: Any) -> BatchLoss:
        loss = run_microbatches(*args, **kwargs)
        return (next(calls) == number and happens(loss)) or loss

    trainer_module.run_microbatches = tampered


def dies(rank: int) -> None:
    if rank == 1:
        in_step(3, lambda loss: os.kill(os.getpid(), signal.SIGKILL))


def breaks(rank: int) -> None:
    def fault(loss: BatchLoss) -> None:
        raise RuntimeError("a fault")

    if rank == 1:
        in_step(3, fault)


def without_a_loss(rank: int) -> None:
    in_step(3, lambda loss: loss._replace(total=math.nan))


def test_a_rank_that_is_killed_is_missing_from_the_report(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a recorded step: what the other one has recorded until then is there with the plan, and the report opens."""
    codes, _, _ = start_workers(2, training, run_of(corpus, tmp_path, [2, 5]), dies)
    assert codes == [1, -signal.SIGKILL] and status(tmp_path)["state"] == "failed"
    folder = tmp_path / PROFILE
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "rank-00000.json"]
    assert command("--report", str(folder)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "ranks missing" in line)
    assert "1" in line and "of 2" in line
    summary = summarize(load_recording(folder))
    assert [step.step for step in summary.steps] == [2] and summary.missing == [1] and summary.planned_bubble
    assert "Missing: rank 1" in (folder / "report.html").read_text()
    assert all((folder / name).is_file() for name in FILES[3:])


def test_a_rank_that_fails_leaves_what_it_has_recorded(corpus: Corpus, tmp_path: Path) -> None:
    """As does the one that it leaves waiting."""
    codes, said, _ = start_workers(2, training, run_of(corpus, tmp_path, [2, 5]), breaks)
    assert codes == [1, 1] and "a fault" in said
    found = load_recording(tmp_path / PROFILE)
    assert [step.step for step in summarize(found).steps] == [2] and not found.missing
    for record in found.ranks:
        unfinished = [span for span in record.spans if span.step == 3]
        assert {Kind.FORWARD, Kind.BACKWARD} <= {span.kind for span in unfinished}
        assert Kind.STEP not in {span.kind for span in unfinished} and record.tokens == [4 * MICROBATCHES * 32]


def test_a_loss_that_is_not_finite_leaves_a_report(corpus: Corpus, tmp_path: Path) -> None:
    """Of the steps before."""
    assert run_workers(2, training, run_of(corpus, tmp_path, [2, 5]), without_a_loss) == [3, 3]
    assert [step.step for step in summarize(load_recording(tmp_path / PROFILE)).steps] == [2]
    assert all((tmp_path / PROFILE / name).is_file() for name in FILES)


def terminated(rank: int, world_size: int, store: str, *words: str) -> int:
    in_step(3, lambda loss: os.kill(os.getpid(), signal.SIGTERM))
    return profiling(rank, world_size, store, *words)


def alone(corpus: Corpus, folder: Path, **profile: Any) -> RunConfig:
    """On one process, of two steps."""
    settings = run_of(corpus, folder, steps=2)
    parallel = replace(settings.parallel, pipeline=1, virtual_pipeline=1)
    return replace(settings, parallel=parallel, profile=replace(settings.profile, **profile))


def test_a_profile_that_is_terminated_leaves_what_it_has_recorded(corpus: Corpus, tmp_path: Path) -> None:
    """As torchrun ends a rank whose peers are lost."""
    file = file_of(alone(corpus, tmp_path), tmp_path / "tiny.yaml")
    codes, said, _ = start_workers(1, terminated, file, "--warmup", "1", "--steps", "4")
    assert codes == [1] and f"SystemExit: {128 + signal.SIGTERM}" in said
    assert [step.step for step in summarize(load_recording(tmp_path / PROFILE)).steps] == [2]


# -- torch's profiler -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("option", [True, False])
def test_torchs_trace_is_of_the_recorded_steps(corpus: Corpus, tmp_path: Path, option: bool) -> None:
    """Of the second step alone, by option and by setting: each microbatch is embedded once."""
    if option:
        file = file_of(alone(corpus, tmp_path), tmp_path / "tiny.yaml")
        assert run_workers(1, profiling, file, "--warmup", "1", "--steps", "1", "--torch-trace") == [0]
    else:
        assert run_workers(1, training, alone(corpus, tmp_path, steps=[2, 2], torch_trace=True)) == [0]
    found = json.loads((tmp_path / PROFILE / "torch-rank-00000.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::embedding" for event in found) == MICROBATCHES
    assert [step.step for step in summarize(load_recording(tmp_path / PROFILE)).steps] == [2]


# -- reports ----------------------------------------------------------------------------------------------------------
def test_a_report_that_fails_does_not_end_the_run(
    corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The recording is there, and it is said how to try again; what an earlier one with more ranks left is not."""
    folder = tmp_path / PROFILE
    folder.mkdir()
    for name in ("rank-00000.json", "rank-00007.json", "torch-rank-00007.json", "mine.txt"):
        (folder / name).write_text("old")
    settings = run_of(corpus, tmp_path, [1, 1], steps=2)
    assert run_workers(2, training, settings, without_a_report) == [0, 0]
    assert status(tmp_path)["state"] == "finished"
    shown = " ".join(capfd.readouterr().out.split())
    assert "report failed (RuntimeError('no font'))" in shown and "depthbench profile --report" in shown
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt", "plan.json", *FILES[:2]]
    assert len(load_recording(folder).ranks) == 2


@pytest.mark.parametrize("steps", [[], [3], [4, 3], [0, 2], [1, 2, 3]], ids=str)
def test_steps_must_be_a_first_and_a_last_one(corpus: Corpus, tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(UserError, match=r"profile\.steps=.* must be the first and the last step to record"):
        check_run(run_of(corpus, tmp_path, steps), 2)
    check_run(run_of(corpus, tmp_path, [3, 3]), 2)


# -- the command ------------------------------------------------------------------------------------------------------
def test_report_makes_the_files_anew(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in FILES[3:]:
        (copied / name).unlink()
    assert command("--report", str(copied)) == 0
    shown = capsys.readouterr().out
    for name in FILES[3:]:
        assert (copied / name).is_file() and name in shown
    assert "tokens a second" in shown and "ranks missing" not in shown


def test_report_of_a_recording_with_a_rank_missing(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says which, and opens all the same."""
    (copied / "rank-00001.json").unlink()
    assert command("--report", str(copied)) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "ranks missing" in line)
    assert "1" in line and "of 2" in line
    assert command("--report", str(copied), "--json") == 0
    assert json.loads(capsys.readouterr().out)["missing"] == [1]


def test_report_as_json(profiled: Profiled, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary and nothing else."""
    assert command("--report", str(copied), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(json.dumps(summarize(profiled.recording).as_dict()))
    assert shown["run"] == "tiny" and shown["world_size"] == 2 and len(shown["steps"]) == STEPS


def test_simulate_a_recording(profiled: Profiled, capsys: pytest.CaptureFixture[str]) -> None:
    """From the run's folder: its own pass, and one of twice the microbatches; the same in words and as JSON."""
    folder = str(profiled.folder)
    assert command("--simulate", folder, "--json") == 0
    own = json.loads(capsys.readouterr().out)
    steps = summarize(profiled.recording).steps
    simulation = calibrate(profiled.recording, [step.step for step in steps]).simulated()
    assert own["measured_pass_seconds"] == median(step.pass_end - step.pass_begin for step in steps) / 1e6
    assert own["simulated_pass_seconds"] == simulation.seconds and 0 < own["simulated_bubble"] < 1
    assert command("--simulate", folder) == 0
    measured, simulated = capsys.readouterr().out.splitlines()
    assert measured.startswith(f"measured: a pass takes {own['measured_pass_seconds']:.4g} s")
    assert simulated.startswith(f"simulated: a pass takes {own['simulated_pass_seconds']:.4g} s")
    assert command("--simulate", folder, f"train.global_batch={8 * MICROBATCHES}", "--json") == 0
    twice = json.loads(capsys.readouterr().out)
    assert own["simulated_pass_seconds"] < twice["simulated_pass_seconds"] < 2 * own["simulated_pass_seconds"]
    with pytest.raises(UserError, match=r"train\.micro_batch=2 is not the recorded 4"):
        command("--simulate", folder, "train.micro_batch=2")


def test_compare_two_recordings(profiled: Profiled, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page in the second one's folder; as JSON on demand."""
    first = str(profiled.folder / PROFILE)
    assert command("--compare", first, str(copied)) == 0
    assert str(copied / "compare.html") in "".join(capsys.readouterr().out.split())
    assert (copied / "compare.html").stat().st_size > 0 and not (Path(first) / "compare.html").exists()
    assert command("--compare", first, str(copied), "--json") == 0
    assert json.loads(capsys.readouterr().out)


def test_a_folder_without_a_recording_is_refused(profiled: Profiled, tmp_path: Path) -> None:
    recorded = str(profiled.folder / PROFILE)
    for words in (["--report", str(tmp_path)], ["--compare", recorded, str(tmp_path)]):
        with pytest.raises(UserError, match=f"{tmp_path} holds no recording"):
            command(*words)


def test_a_broken_plan_is_named(copied: Path) -> None:
    """Without it, all else is shown."""
    (copied / "plan.json").write_text('{"run": {"name"')
    with pytest.raises(UserError, match=r"plan\.json is no plan .*: delete it to go without"):
        command("--report", str(copied))
    (copied / "plan.json").unlink()
    assert command("--report", str(copied)) == 0


def test_a_broken_rank_file_is_named(copied: Path) -> None:
    (copied / "rank-00001.json").write_text('{"format": 1, "rank"')
    with pytest.raises(UserError, match=r"rank-00001\.json is no rank's recording"):
        command("--report", str(copied))


@pytest.mark.parametrize(
    "words", [[], ["tiny", "--report", "F"], ["tiny", "--compare", "A", "B"], ["--report", "F", "--compare", "A", "B"]]
)
def test_one_thing_at_a_time(words: list[str]) -> None:
    with pytest.raises(UserError, match="give a RUN to record, or --report FOLDER, or --compare A B"):
        command(*words)


def test_options_of_another_use_are_refused() -> None:
    with pytest.raises(UserError, match="--json is for --report, --compare and --simulate"):
        command("depthbench_400m", "--json")
    with pytest.raises(UserError, match="--cluster=h100 is for a RUN to record"):
        command("--report", "F", "--cluster", "h100")


@pytest.mark.parametrize(("words", "said"), [(["--steps", "0"], "--steps=0"), (["--warmup", "-1"], "--warmup=-1")])
def test_numbers_of_steps_that_cannot_be(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f"{said} must be at least"):
        command("depthbench_400m", *words)


# -- clocks -----------------------------------------------------------------------------------------------------------
SHIFT = 3.6e9  # microseconds: an hour


def offset(rank: int, world_size: int, store: str, tamper: Callable[[int], None]) -> tuple[float, float]:
    join_world(rank, world_size, store)
    tamper(rank)
    return offset_to_rank_0()


def shifted(rank: int) -> None:
    """Clocks that are ahead of rank 0's, each by another time. Really there is one clock on a machine."""
    mark = CpuClock.mark
    CpuClock.mark = lambda self: mark(self) + rank * SHIFT  # type: ignore[method-assign]


def test_clocks_are_laid_over_each_other() -> None:
    """The offset found is right to within the error that it names, and that is small beside the offset."""
    first, *others = run_workers(3, offset, shifted)
    assert first == (0.0, 0.0)
    for rank, (found, error) in enumerate(others, 1):
        assert abs(found + rank * SHIFT) <= error
        assert 0 < error < 1e-3 * SHIFT  # seconds: a message takes less
