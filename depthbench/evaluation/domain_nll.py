"""The domain NLL of a model: each task's tokens pooled, a category as the mean of its tasks, all tokens pooled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from depthbench.errors import UserError

from .domain import CATEGORIES, TASKS, DomainTask
from .export import Evaluated
from .nll import Sample, make_sample, score
from .rows import TaskRows

Advance = Callable[[str, int, int], None]  # a task, how many samples it has, how many more are scored


@dataclass(frozen=True)
class TaskNLL:
    """source: the file, or the hub's name. nll: of each sample, in nats, summed over its target tokens."""

    task: DomainTask
    source: str
    samples: list[Sample]
    nll: list[float]


@dataclass(frozen=True)
class DomainNLL:
    """The result; as_dict says all of it."""

    tasks: list[TaskNLL]

    def as_dict(self) -> dict[str, Any]:
        """tasks: by name. categories: means of their tasks, for those of which every task was run. all: pooled."""
        tasks = {
            found.task.name: {"category": found.task.category, "source": found.source, **_pooled([found])}
            for found in self.tasks
        }
        means = {}
        for category in CATEGORIES:
            wanted = [task.name for task in TASKS.values() if task.category == category]
            if all(name in tasks for name in wanted):
                means[category] = {
                    key: sum(tasks[name][key] for name in wanted) / len(wanted)
                    for key in ("nll_per_token", "bits_per_byte")
                }
        return {"tasks": tasks, "categories": means, "all": _pooled(self.tasks)}

    def sample_records(self) -> dict[str, list[dict[str, Any]]]:
        """A dictionary a sample, by task."""
        return {
            found.task.name: [
                {
                    "row": number,
                    "nll": nll,
                    "tokens": len(sample.target),
                    "bytes": sample.size,
                    "context_tokens_cut": sample.context_cut,
                    "target_tokens_cut": sample.target_cut,
                }
                for number, (sample, nll) in enumerate(zip(found.samples, found.nll, strict=True))
            ]
            for found in self.tasks
        }


def _pooled(parts: list[TaskNLL]) -> dict[str, Any]:
    samples = [sample for part in parts for sample in part.samples]
    nll = math.fsum(value for part in parts for value in part.nll)
    tokens, size = sum(len(sample.target) for sample in samples), sum(sample.size for sample in samples)
    return {
        "samples": len(samples),
        "tokens": tokens,
        "bytes": size,
        "nll": nll,
        "nll_per_token": nll / tokens if tokens else math.nan,
        "bits_per_byte": nll / math.log(2) / size if size else math.nan,
        "samples_with_context_cut": sum(sample.context_cut > 0 for sample in samples),
        "samples_with_target_cut": sum(sample.target_cut > 0 for sample in samples),
        "target_tokens_cut": sum(sample.target_cut for sample in samples),
    }


def domain_nll(
    model: Evaluated, sets: list[TaskRows], *, batch_size: int, advance: Advance = lambda task, total, more: None
) -> DomainNLL:
    """Score every row of `sets`. All are tokenized before the first is scored. Raises UserError for a row without a
    context."""
    prepared = [_samples(model, found) for found in sets]
    tasks = []
    for found, samples in zip(sets, prepared, strict=True):
        scored = partial(advance, found.task.name, len(samples))
        tasks.append(TaskNLL(found.task, found.place, samples, score(model.model, samples, batch_size, scored)))
    return DomainNLL(tasks)


def _samples(model: Evaluated, found: TaskRows) -> list[Sample]:
    samples = []
    for number, row in enumerate(found.rows):
        try:
            samples.append(make_sample(model.tokenizer, *found.task.pair(row), model.max_length))
        except UserError as error:
            raise UserError(f"{found.place} row {number}: {error}") from error
    return samples
