"""Validation loss in every layout equals a naive loop over the set, one sequence at a time, in one process."""

from pathlib import Path

import pytest
import torch
from megatron.core.datasets.utils import Split

from depthbench.config.schema import EvalForm, RunConfig
from depthbench.data.corpus import WindowSettings, corpora
from depthbench.data.evaluation import PaddedSet, evaluation_set
from depthbench.training.evaluation import evaluate
from tests.corpora import Corpus, trainable_run, write_counting
from tests.harness import run_workers
from tests.models import start_model, start_stage

# processes, layout, microbatches of so many sequences: 4 divides neither 14 nor 20, so the last ones are filled up, and
# in a pipeline the last group of them
LAYOUTS: dict[str, tuple[int, dict[str, object], tuple[int, ...]]] = {
    "dp1": (1, {}, (4, 1)),
    "dp2": (2, {}, (4, 1)),
    "tp2_sp": (2, {"tensor": 2, "sequence": True}, (4, 1)),
    "pp2": (2, {"pipeline": 2}, (4,)),
    "pp2_vp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, (4, 1)),
    "pp2_dp2": (4, {"pipeline": 2}, (4,)),
}


def the_run(corpus: Corpus, folder: Path, micro_batch: int = 4, form: str = "windows", **parallel: object) -> RunConfig:
    """Fourteen documents, some shorter than a window and one of a single token; or twenty windows."""
    valid = write_counting(folder / "valid", [36, 7, 1, 17, 2, 18, 13, 76, 17, 5, 31, 46, 3, 52])
    return trainable_run(
        corpus,
        folder,
        data={"valid": [{"prefix": valid}], "eval_form": form},
        model={"num_layers": 4, "sequence_length": 16},
        train={"precision": "fp64", "micro_batch": micro_batch, "global_batch": 2 * micro_batch},
        parallel=parallel,
    )


def validation_set(run: RunConfig) -> PaddedSet:
    settings = WindowSettings(run.model.sequence_length, run.model.vocab_size, 2, run.seed, Path(run.folder) / "cache")
    found, _ = corpora(run.data, Split.valid, settings)
    if not torch.distributed.is_initialized():
        found[0].build_index(1)
    return evaluation_set(found, run.data.eval_form is EvalForm.DOCUMENTS, None)


def naive(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[float, int]:
    items = validation_set(run)
    stage = start_stage(rank, world_size, store, run)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for number in range(items.count):
            item = items[number]
            losses = stage(item["tokens"][None], item["labels"][None])[:, 0]
            for loss, counts in zip(losses.tolist(), item["loss_mask"].tolist(), strict=True):
                if counts:
                    total, tokens = total + loss, tokens + 1
    return total, tokens


def evaluated(rank: int, world_size: int, store: str, run: RunConfig) -> tuple[float, int]:
    model = start_model(rank, world_size, store, run)
    items = validation_set(run)
    if items.count > 8 * run.train.micro_batch * model.context.dp_size:  # it asks after every eighth round
        assert evaluate(model, items, run.train.micro_batch, lambda: True) is None
        assert all(stage.training for stage in model.stages)
    loss = evaluate(model, items, run.train.micro_batch, lambda: False)
    assert loss is not None
    for stage in model.stages:
        assert stage.training and all(parameter.grad is None for parameter in stage.parameters())
    if model.transport:
        model.transport.cache.assert_empty()
    return loss.total, loss.tokens


@pytest.mark.parametrize("form", ["windows", "documents"])
def test_equals_a_naive_loop(form: str, corpus: Corpus, tmp_path: Path) -> None:
    ((total, tokens),) = run_workers(1, naive, the_run(corpus, tmp_path, form=form))
    assert tokens == {"windows": 320, "documents": 153}[form]
    for world_size, parallel, micro_batches in LAYOUTS.values():
        for micro_batch in micro_batches:
            run = the_run(corpus, tmp_path, micro_batch, form, **parallel)
            for found, count in run_workers(world_size, evaluated, run):
                assert count == tokens
                assert found == pytest.approx(total, rel=1e-12)
