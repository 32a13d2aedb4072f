"""Tasks of lm-evaluation-harness, run by its own interface on the model that is loaded already."""

import difflib
import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets.config
import huggingface_hub.constants
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from depthbench.errors import UserError

from .export import Evaluated

_BOOTSTRAPS = 1000  # of errors that have no closed form; the harness's own 100,000 take minutes


@dataclass(frozen=True)
class HarnessResults:
    """results: by task or group, metric and filter, as the harness names them. samples: its records, by task.
    cut: requests whose context lost tokens to the length cap."""

    results: dict[str, dict[str, Any]]
    rows: dict[str, int]
    samples: dict[str, list[dict[str, Any]]]
    cut: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "lm_eval": version("lm_eval"),
            "tasks": self.results,
            "rows": self.rows,
            "requests_with_context_cut": self.cut,
        }


class _Model(HFLM):
    """The harness's own model class; it counts what the harness would only log, and refuses what it would assert."""

    cut = 0

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens, and {self.max_length} is the most that the model "
                    "may be given: leave its task out"
                )
            self.cut += len(context) + len(continuation) > self.max_length + 1
        return super()._loglikelihood_tokens(requests, *args, **kwargs)


def find_tasks(names: list[str], include: Path | None) -> TaskManager:
    """A manager that knows all of `names`: YAML tasks in the folder `include`, or else the harness's own as well.

    Raises UserError naming those it does not know, and the nearest names.
    """
    if include and not include.is_dir():
        raise UserError(f"--include-path={include} is no folder")
    manager = TaskManager(include_path=include, include_defaults=False) if include else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include)  # reads some ten thousand files
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks)
            raise UserError(
                f"lm-evaluation-harness has no task {name!r}; nearest: {', '.join(near) or 'none'}. "
                "Tasks of your own: --include-path FOLDER with their YAML files"
            )
    return manager


def run_tasks(
    model: Evaluated, names: list[str], include: Path | None, *, batch_size: int, limit: int | None = None
) -> HarnessResults:
    """Run tasks, groups or tags.

    Log-probabilities are in float32 at least. limit: rows of each task. Raises UserError for a task that is not known,
    whose data cannot be had, or whose continuation is longer than the model takes.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = find_tasks(names, include)
    for name in names:
        _check_data(manager, name)
    half = model.model.dtype.itemsize < 4
    harness = _Model(
        pretrained=model.model,
        tokenizer=model.tokenizer,
        batch_size=batch_size,
        max_length=model.max_length,
        softmax_dtype="float32" if half else None,
    )
    found = simple_evaluate(
        harness, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=True
    )
    assert found is not None  # None on ranks other than the first alone
    rows = {name: count["effective"] for name, count in found["n-samples"].items()}
    return HarnessResults(found["results"], rows, found["samples"], harness.cut)


def _check_data(manager: TaskManager, name: str) -> None:
    """Load the task, which fetches its data."""
    try:
        manager.load([name])
    except Exception as error:  # each task's own code, the data sets' and the hub client's
        offline = huggingface_hub.constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE
        raise UserError(
            f"task {name} cannot be loaded{' offline' if offline else ''}: {type(error).__name__}: {error}. Its data "
            "must be in the cache of `datasets` (load it once where there is a network; HF_HOME says where the cache "
            "is), or name local files in a YAML task of your own (--include-path)"
        ) from error
