"""A stage that no longer answers ends the run, with a message that says for what the others waited."""

import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from depthbench.pipeline.watchdog import EXIT_CODE
from depthbench.training.optimizer import Optimizer
from depthbench.training.signals import StopSignals
from depthbench.training.trainer import Trainer
from tests.corpora import Corpus, trainable_run
from tests.harness import start_workers
from tests.training.test_resume import training


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def silent_from(call: int, owner: type, method: str, folder: Path) -> Callable[[int], None]:
    """Rank 1 stops taking part at that call of a method, but stays alive until rank 0 has ended."""

    def before(rank: int) -> None:
        if rank == 0:
            (folder / "rank-0").write_text(str(os.getpid()))
        original, calls = getattr(owner, method), itertools.count()

        def patched(*arguments: Any) -> Any:
            if rank == 1 and next(calls) == call:
                while not gone(int((folder / "rank-0").read_text())):
                    time.sleep(0.05)
                os._exit(0)
            return original(*arguments)

        setattr(owner, method, patched)

    return before


@pytest.mark.parametrize(
    ("owner", "method", "what"),
    [
        (Trainer, "_update", r"forward message of microbatch \d, chunk \d to \d"),
        (Optimizer, "prepare", "other ranks' gradient norm"),
        (StopSignals, "agreed", "other ranks' word of signals"),
    ],
    ids=["message", "norm", "signals"],
)
def test_the_watchdog_names_what_a_stage_waits_for(
    owner: type, method: str, what: str, corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trainable_run(
        corpus,
        tmp_path / "run",
        model={"num_layers": 4},
        parallel={"pipeline": 2, "virtual_pipeline": 2},
        pipeline={"timeout": 8.0},
        train={"eval_every": 0},
    )
    codes, _, _ = start_workers(2, training, run, silent_from(2, owner, method, tmp_path))
    assert codes[0] == EXIT_CODE
    said = capfd.readouterr().err
    assert re.search(rf"rank 0, pipeline stage 0: waited \d+ s for the {what} \(limit 8 s\); giving up", said)
