"""A stage that no longer answers ends the run, with a message that says for what the others waited."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from depthbench.pipeline.watchdog import EXIT_CODE
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


def silent_from_step(step: int, folder: Path) -> Callable[[int], None]:
    """Rank 1 stops taking part before that update, but stays alive until rank 0 has ended."""

    def before(rank: int) -> None:
        if rank == 0:
            (folder / "rank-0").write_text(str(os.getpid()))
        update = Trainer._update

        def patched(self: Trainer, microbatches: list[Any]) -> dict[str, float]:
            if rank == 1 and self.step == step:
                while not gone(int((folder / "rank-0").read_text())):
                    time.sleep(0.05)
                os._exit(0)
            return update(self, microbatches)

        Trainer._update = patched  # type: ignore[method-assign]

    return before


def test_the_watchdog_names_the_message(corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = trainable_run(
        corpus,
        tmp_path / "run",
        model={"num_layers": 4},
        parallel={"pipeline": 2, "virtual_pipeline": 2},
        pipeline={"timeout": 8.0},
        train={"eval_every": 0},
    )
    codes, _, _ = start_workers(2, training, run, silent_from_step(2, tmp_path))
    assert codes[0] == EXIT_CODE
    said = capfd.readouterr().err
    assert "rank 0, pipeline stage 0: waited" in said
    assert re.search(r"for the forward message of microbatch \d, chunk \d to \d \(limit 8 s\); giving up", said)
