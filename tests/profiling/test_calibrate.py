"""The simulator, fed with a recording's costs, takes as long as what was recorded."""

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from depthbench.config.load import plain
from depthbench.errors import UserError
from depthbench.profiling.analysis import summarize
from depthbench.profiling.calibrate import calibrate
from depthbench.profiling.events import Recording
from tests.models import small_run

from .recordings import Pipeline


def recorded(stages: int, virtual: int, microbatches: int, folder: Path) -> Recording:
    """Runs of the overlapping schedule, whose costs vary by some percents from one to the next."""
    run = small_run(
        "pre_ln",
        model={"num_layers": stages * virtual},
        parallel={"pipeline": stages, "virtual_pipeline": virtual},
        pipeline={"overlap_p2p": virtual > 1},
        train={"global_batch": 2 * microbatches, "micro_batch": 2},
    )
    found = Pipeline(stages=stages, virtual=virtual, microbatches=microbatches, steps=4).recording(folder)
    return replace(found, plan={"run": plain(run)})


@pytest.mark.parametrize(("stages", "virtual", "microbatches"), [(2, 2, 4), (2, 3, 6), (4, 2, 8)])
def test_a_simulated_pass_is_as_long_as_the_recorded_ones(
    stages: int, virtual: int, microbatches: int, tmp_path: Path
) -> None:
    """Calibrated on two steps, compared with the two others: time within 3 %, bubble within 3 points. (Without overlap
    a stage posts a receive only when it waits for it, unlike here; benchmarks/profile compares real recordings.)"""
    recording = recorded(stages, virtual, microbatches, tmp_path)
    steps = summarize(recording).steps
    calibration = calibrate(recording, [step.step for step in steps[::2]])
    simulation = calibration.simulated()
    assert simulation.seconds * 1e6 == pytest.approx(mean(s.pass_end - s.pass_begin for s in steps[1::2]), rel=0.03)
    assert calibration.bubble(simulation) == pytest.approx(mean(s.bubble for s in steps[1::2]), abs=0.03)


def test_costs_are_those_recorded(tmp_path: Path) -> None:
    """The second stage is slower by 15 %; messages take 150 microseconds."""
    costs = calibrate(recorded(2, 1, 6, tmp_path), [1, 2, 3]).costs
    assert costs.forward[1] / costs.forward[0] == pytest.approx(1.15, rel=0.02)
    assert costs.backward[0] == pytest.approx(1900e-6, rel=0.05)
    assert costs.forward_edges == pytest.approx([150e-6], rel=0.01)


def test_more_microbatches_than_were_recorded(tmp_path: Path) -> None:
    """The same costs under another batch: a pass grows by its microbatches, the bubble shrinks."""
    calibration = calibrate(recorded(2, 1, 6, tmp_path), [1, 2])
    longer = calibration.changed(["train.global_batch=48", "train.eval_every=0"])
    few, many = calibration.simulated(), calibration.simulated(longer)
    assert many.seconds > 3 * few.seconds
    assert calibration.bubble(many) < calibration.bubble(few)


def test_a_recording_with_a_missing_rank_is_refused(tmp_path: Path) -> None:
    recording = Pipeline(stages=2, virtual=1, microbatches=4).recording(tmp_path, missing=(1,))
    with pytest.raises(UserError, match=r"not whole \(ranks \[1\] missing\)"):
        calibrate(recording, [1])


def test_only_batches_and_the_schedule_can_be_others(tmp_path: Path) -> None:
    calibration = calibrate(recorded(2, 2, 4, tmp_path), [1, 2])
    for word, said in (("model.num_layers=8", "model is not"), ("train.micro_batch=1", "not the recorded 2")):
        with pytest.raises(UserError, match=said):
            calibration.changed([word])
