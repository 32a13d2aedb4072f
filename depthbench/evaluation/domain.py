"""The six sets of the domain NLL and what of a row is given and what is scored, as DepthBench's evaluation has them.

Zero-shot, without a chat template and without a token for the beginning.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class DomainTask:
    """name: of its file, too. dataset, config, split: on the hub. fields: that every row needs. pair: its context and
    its target."""

    name: str
    category: str
    dataset: str
    config: str | None
    split: str
    fields: tuple[str, ...]
    pair: Callable[[Row], tuple[str, str]]


def _apart(context: str, target: str) -> tuple[str, str]:
    """A space between them, where neither side has whitespace."""
    glued = bool(target) and not context[-1].isspace() and not target[0].isspace()
    return context, f" {target}" if glued else target


def _mbpp(row: Row) -> tuple[str, str]:
    tests = "\n".join([*row["test_list"], "", "", ""][:3])
    context = (
        f"You are an expert Python programmer, and here is your task: {row['text']} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )
    return context, row["code"] if row["code"].endswith("\n") else row["code"] + "\n"


def _humaneval(row: Row) -> tuple[str, str]:
    return row["prompt"], row["canonical_solution"]


def _sciq(row: Row) -> tuple[str, str]:
    return _apart(f"Question: {row['question']}\nAnswer:", f"{row['correct_answer']}\nExplanation: {row['support']}")


def _gpqa(row: Row) -> tuple[str, str]:
    choices = [row[name].strip() for name in _GPQA_CHOICES]
    identity = str(row.get("Record ID") or row["Question"])
    seed = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
    random.Random(seed).shuffle(choices)
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    explanation = str(row.get("Explanation") or "").strip()
    target = row["Correct Answer"].strip() + (f"\nExplanation: {explanation}" if explanation else "")
    return _apart(f"Question: {row['Question'].strip()}\nChoices:\n{listed}\nAnswer:", target)


def _gsm8k(row: Row) -> tuple[str, str]:
    return _apart(f"Question: {row['question']}\nAnswer:", row["answer"])


def _math500(row: Row) -> tuple[str, str]:
    return _apart(f"Problem:\n{row['problem']}\n\nSolution:", row["solution"])


_GPQA_CHOICES = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_ALL = (
    DomainTask("mbpp", "coding", "google-research-datasets/mbpp", "full", "test", ("text", "code", "test_list"), _mbpp),
    DomainTask(
        "humaneval", "coding", "openai/openai_humaneval", None, "test", ("prompt", "canonical_solution"), _humaneval
    ),
    DomainTask("sciq", "stem", "allenai/sciq", None, "test", ("question", "correct_answer", "support"), _sciq),
    DomainTask("gpqa_diamond", "stem", "Idavidrein/gpqa", "gpqa_diamond", "train", ("Question", *_GPQA_CHOICES), _gpqa),
    DomainTask("gsm8k", "math", "openai/gsm8k", "main", "test", ("question", "answer"), _gsm8k),
    DomainTask("math500", "math", "HuggingFaceH4/MATH-500", "default", "test", ("problem", "solution"), _math500),
)
TASKS = {task.name: task for task in _ALL}
CATEGORIES = tuple(dict.fromkeys(task.category for task in _ALL))
