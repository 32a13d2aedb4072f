"""A run that starts from another's weights: the same ones under every layout, to their last digit in the masters."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from depthbench.checkpoint.folder import find
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError
from depthbench.training.preflight import preflight
from tests.checkpoint.reading import read_checkpoint
from tests.corpora import VOCAB, Corpus, trainable_run
from tests.harness import run_workers

from .test_resume import exact, training

MODEL = {"num_layers": 4, "vocab_size": VOCAB + 3, "tie_embeddings": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {"distributed_optimizer": True, "bucket_size": 5000}),
    "tp2_sp_pp2": (4, {"tensor": 2, "sequence": True, "pipeline": 2, "distributed_optimizer": True}),
}


@pytest.fixture(scope="module")
def first(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished fp32 run, with two checkpoints."""
    folder = tmp_path_factory.mktemp("initial") / "first"
    run = trainable_run(corpus, folder, model=MODEL)
    assert run_workers(1, training, run) == [0]
    return folder


def start(corpus: Corpus, folder: Path, initial: Path, **sections: Any) -> RunConfig:
    return trainable_run(corpus, folder, **{"model": MODEL, "initial": str(initial), **sections})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_have_every_digit(first: Path, corpus: Corpus, tmp_path: Path, layout: str) -> None:
    """After a step too small to change anything, in bfloat16."""
    processes, parallel = LAYOUTS[layout]
    run = start(
        corpus,
        tmp_path / "run",
        first,
        parallel=parallel,
        train={"steps": 1, "eval_every": 0, "precision": "bf16"},
        optimizer={"lr": 1e-30},
    )
    assert run_workers(processes, training, run) == [0] * processes
    before, after = (read_checkpoint(find(folder).path) for folder in (first, tmp_path / "run"))
    weights = {key.removeprefix("model.") for key in before if key.startswith("model.")}
    for name in weights:
        given, kept = before[f"model.{name}"], after[f"model.{name}"]
        assert torch.allclose(kept, given.to(kept.dtype), rtol=0, atol=1e-29), name
        if kept.dtype is torch.bfloat16:
            assert torch.allclose(after[f"optimizer.master.{name}"], given, rtol=0, atol=1e-29), name
    assert {after[f"model.{name}"].dtype for name in weights} == {torch.bfloat16, torch.float32}
    assert find(tmp_path / "run").manifest()["step"] == 1


def test_every_layout_goes_the_same_way(first: Path, corpus: Corpus, tmp_path: Path) -> None:
    losses = {}
    for layout in ("one", "tp2_sp_pp2"):
        processes, parallel = LAYOUTS[layout]
        run = start(corpus, tmp_path / layout, first, parallel=parallel, train={"steps": 3, "eval_every": 0})
        assert run_workers(processes, training, run) == [0] * processes
        losses[layout] = [line["loss"] for line in exact(tmp_path / layout)]
    drawn = trainable_run(corpus, tmp_path / "drawn", model=MODEL, train={"steps": 3, "eval_every": 0})
    assert run_workers(1, training, drawn) == [0]
    assert losses["one"][0] < exact(tmp_path / "drawn")[0]["loss"]
    assert losses["tp2_sp_pp2"] == pytest.approx(losses["one"], rel=1e-5)


def test_a_chosen_checkpoint_and_a_resumed_run(first: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Resuming takes the run's own checkpoint: what it started from may be gone by then."""
    copy = Path(shutil.copytree(find(first).path.with_name("step_00000002"), tmp_path / "step_00000002"))
    run = start(corpus, tmp_path / "run", copy, train={"stop_at": 2, "eval_every": 0})
    ready = preflight(run, 1, first_of_node=True)
    assert ready.initial and ready.initial.step == 2 and ready.resume is None
    assert run_workers(1, training, run) == [0]
    shutil.rmtree(copy)
    whole = replace(run, train=replace(run.train, stop_at=None))
    ready = preflight(whole, 1, first_of_node=True)
    assert ready.initial is None and ready.resume and ready.resume.step == 2
    assert run_workers(1, training, whole) == [0]
    assert [line["step"] for line in exact(tmp_path / "run")] == [1, 2, 3, 4]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("depth", {"model": {**MODEL, "num_layers": 3}}, r"model\.num_layers is 4 there and 3 here"),
    ("theta", {"model": {**MODEL, "rope_theta": 5e5}}, r"model\.rope_theta is 10000\.0 there and 500000\.0 here"),
    (
        "two",
        {"model": {**MODEL, "tie_embeddings": False, "num_kv_heads": 1}},
        r"tie_embeddings is True there and False here; model\.num_kv_heads is 2 there and 1 here",
    ),
    (
        "architecture",
        {"residual": {"architecture": "hc"}},
        r"architecture is block_attnres there and hc here; .* residual\.num_streams is unset there and 4 here",
    ),
    (
        "eps",
        {"residual": {"architecture": "block_attnres", "sublayers_per_block": 2, "read_norm_eps": 1e-6}},
        r"read_norm_eps is 1e-05 there and 1e-06 here\. Take .* model=FOLDER/model\.yaml",
    ),
]


@pytest.mark.parametrize(("sections", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_another_model_is_refused(
    first: Path, corpus: Corpus, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        preflight(start(corpus, tmp_path / "run", first, **sections), 1, first_of_node=True)


def test_what_may_differ(first: Path, corpus: Corpus, tmp_path: Path) -> None:
    """A run may train longer sequences, and reach further with RoPE; what is the same by another name is the same."""
    longer = {**MODEL, "sequence_length": 64, "rope_scaling": {"kind": "linear", "factor": 2.0}, "num_kv_heads": 2}
    assert preflight(start(corpus, tmp_path / "run", first, model=longer), 1, first_of_node=True).initial


def nothing(path: Path) -> None:
    shutil.rmtree(path)


def a_file_less(path: Path) -> None:
    next(find(path).path.glob("*.distcp")).unlink()


@pytest.mark.parametrize(("damage", "message"), [(nothing, "no complete checkpoint"), (a_file_less, "is missing")])
def test_a_checkpoint_that_is_not_whole(
    first: Path, corpus: Corpus, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    copy = Path(shutil.copytree(first, tmp_path / "first"))
    damage(copy)
    with pytest.raises(UserError, match=message):
        preflight(start(corpus, tmp_path / "run", copy), 1, first_of_node=True)


def test_weights_alone_are_no_state_to_resume_from(first: Path, corpus: Corpus, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(first, tmp_path / "run"))
    file = find(copy).path / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "weights_only": True}))
    with pytest.raises(UserError, match=r"weights alone, no optimizer state.* initial=\S+ and run_dir=FOLDER"):
        preflight(trainable_run(corpus, copy, model=MODEL), 1, first_of_node=True)
