"""Tasks of lm-evaluation-harness, run by its own interface on the model that is loaded already."""

import contextlib
import difflib
import logging
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_OFFLINE
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from depthbench.errors import UserError

from .export import Evaluated

logging.getLogger("lm_eval").setLevel(logging.ERROR)
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

    def generate_until(self, requests: list[Instance], *args: Any, **kwargs: Any) -> list[str]:
        for request in requests:
            context, settings = request.args
            new = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise UserError(
                    f"task {request.task_name} lets the model write {new} tokens, which leaves no room for what it is "
                    f"given: {self.max_length} are the most together. Leave it out, or set a smaller max_gen_toks in "
                    "the generation_kwargs of a YAML task of your own (--include-path)"
                )
            self.cut += len(self.tok_encode(context)) + new > self.max_length
        return list(super().generate_until(requests, *args, **kwargs))


def find_tasks(names: list[str], include: Path | None) -> TaskManager:
    """A manager of all of `names`, tasks, groups or tags: those of YAML files under `include`, and the harness's own.

    Each is loaded once, which fetches its data. Raises UserError for a name that is not known (with the nearest), for
    a task whose data cannot be had, and for one that runs what the model writes.
    """
    if include and not include.is_dir():
        raise UserError(f"--include-path={include} is no folder")
    manager = TaskManager(include_path=include, include_defaults=False) if include else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include)  # reads some ten thousand files
    for name in names:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks)) or "none"
            raise UserError(
                f"lm-evaluation-harness has no task {name!r}; nearest: {near}. "
                "Tasks of your own: --include-path FOLDER with their YAML files"
            )
        try:
            loaded = manager.load([name])
        except Exception as error:  # each task's own code, the data sets' and the hub client's
            offline = " offline" if HF_HUB_OFFLINE else ""
            raise UserError(
                f"task {name} cannot be loaded{offline}: {type(error).__name__}: {error}. Its data must be in the "
                "cache of `datasets` (load it once where there is a network; HF_HOME says where the cache is), or name "
                "local files in a YAML task of your own (--include-path)"
            ) from error
        if unsafe := [task for task, held in loaded["tasks"].items() if getattr(held, "UNSAFE_CODE", False)]:
            raise UserError(
                f"task {unsafe[0]} runs the programs that the model writes, which this command does not do: leave it "
                "out, or call lm_eval itself in a sandbox"
            )
    return manager


def run_tasks(
    model: Evaluated, names: list[str], manager: TaskManager, *, batch_size: int, limit: int | None = None
) -> HarnessResults:
    """Run what `find_tasks` found.

    Log-probabilities are in float32 at least. limit: rows of each task. Raises UserError where a continuation is
    longer than the model takes, or one to be written may become so long.
    """
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # the harness would fork this process to estimate errors
    harness = _Model(
        pretrained=model.model,
        tokenizer=model.tokenizer,
        batch_size=batch_size,
        max_length=model.max_length,
        softmax_dtype="float32" if model.model.dtype.itemsize < 4 else None,
    )
    with contextlib.redirect_stdout(sys.stderr):  # it prints now and then
        found = simple_evaluate(
            harness, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=_BOOTSTRAPS, log_samples=True
        )
    assert found is not None  # None on ranks other than the first alone
    rows = {name: count["effective"] for name, count in found["n-samples"].items()}
    return HarnessResults(found["results"], rows, found["samples"], harness.cut)
