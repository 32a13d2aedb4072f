"""The commands in processes of their own, on checkpoints of models that were never trained."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from depthbench import cli
from depthbench.config.load import parse_overrides
from tests.convert.checkpoints import saved
from tests.corpora import Corpus, trainable_run
from tests.harness import defer_world, run_workers

MODEL = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 515}
LAYOUTS: dict[str, list[str]] = {
    "single": [],
    "tp2_sp": ["parallel.tensor=2"],
    "tp2": ["parallel.tensor=2", "parallel.sequence=false"],
    "pp2_vp2": ["parallel.pipeline=2", "parallel.virtual_pipeline=2"],
    "pp2_tp2_sp": ["parallel.pipeline=2", "parallel.tensor=2"],
}


def processes_of(layout: str) -> int:
    _, given = parse_overrides(LAYOUTS[layout])
    parallel = given.get("parallel", {})
    return parallel.get("tensor", 1) * parallel.get("pipeline", 1)


def checkpoint(corpus: Corpus, folder: Path, architecture: str = "block_attnres", **residual: Any) -> Path:
    """Of a model of two stages in float64, whose random weights do not change with the layout."""
    run = trainable_run(
        corpus,
        folder,
        model=MODEL,
        residual={"architecture": architecture, **residual},
        parallel={"pipeline": 2},
        train={"precision": "fp64"},
        checkpoint={"every": 0},
    )
    return saved(run, processes=2)


class Said(NamedTuple):
    """What the first process returned and printed, and what all of them printed."""

    code: int
    out: str
    err: str
    everyone: str


def _command(rank: int, world_size: int, store: str, words: Sequence[str]) -> tuple[int, str, str]:
    defer_world(rank, world_size, store)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(list(words))
    return code, out.getvalue(), err.getvalue()


def command(*words: str, processes: int = 1) -> Said:
    found = run_workers(processes, _command, words)
    assert len({code for code, _, _ in found}) == 1
    code, out, err = found[0]
    return Said(code, out, err, "".join(out + err for _, out, err in found))
