"""Rows in the real sets' formats, and the context and target that each must give, written out."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

Rows = dict[str, list[dict[str, Any]]]
Pairs = dict[str, list[tuple[str, str]]]

GPQA = {
    "Record ID": "recZ1",
    "Question": " Which gas do plants take up? ",
    "Correct Answer": "carbon dioxide\n",
    "Incorrect Answer 1": "neon",
    "Incorrect Answer 2": " argon",
    "Incorrect Answer 3": "helium",
    "Explanation": "",
}

ROWS: Rows = {
    "mbpp": [
        {
            "task_id": 11,
            "text": "Write a function to add.",
            "code": "def add(a, b):\r\n    return a + b",
            "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(2, 2) == 4", "assert False"],
            "test_setup_code": "",
        },
        {"text": "Return one.", "code": "def one():\n    return 1\n", "test_list": ["assert one() == 1"]},
    ],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": 'def twice(x: int) -> int:\n    """Twice x."""\n',
            "canonical_solution": "    return 2 * x\n",
            "entry_point": "twice",
        }
    ],
    "sciq": [
        {
            "question": "What do bees make?",
            "distractor1": "milk",
            "distractor2": "silk",
            "distractor3": "ink",
            "correct_answer": "honey",
            "support": "Bees turn nectar into honey.\u2028Café.",
        },
        {
            "question": "Who wrote Hamlet?",
            "distractor1": "Marlowe",
            "distractor2": "Kyd",
            "distractor3": "Jonson",
            "correct_answer": "Shakespeare",
            "support": "",
        },
    ],
    "gpqa_diamond": [GPQA, {**GPQA, "Record ID": None, "Explanation": " Photosynthesis. "}],
    "gsm8k": [{"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}],
    "math500": [{"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2", "subject": "Algebra"}],
}


def _shuffled(identity: str) -> list[str]:
    choices = ["carbon dioxide", "neon", "argon", "helium"]
    random.Random(int(hashlib.sha256(identity.encode()).hexdigest()[:16], 16)).shuffle(choices)
    return choices


def _gpqa(identity: str) -> str:
    a, b, c, d = _shuffled(identity)
    return f"Question: Which gas do plants take up?\nChoices:\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer:"


_EXPERT = "You are an expert Python programmer, and here is your task: "
PAIRS: Pairs = {
    "mbpp": [
        (
            f"{_EXPERT}Write a function to add. Your code should pass these tests:\n\n"
            "assert add(1, 2) == 3\nassert add(0, 0) == 0\nassert add(2, 2) == 4\n[BEGIN]\n",
            "def add(a, b):\r\n    return a + b\n",
        ),
        (
            f"{_EXPERT}Return one. Your code should pass these tests:\n\nassert one() == 1\n\n\n[BEGIN]\n",
            "def one():\n    return 1\n",
        ),
    ],
    "humaneval": [('def twice(x: int) -> int:\n    """Twice x."""\n', "    return 2 * x\n")],
    "sciq": [
        (
            "Question: What do bees make?\nAnswer:",
            " honey\nExplanation: Bees turn nectar into honey.\u2028Café.",
        ),
        ("Question: Who wrote Hamlet?\nAnswer:", " Shakespeare\nExplanation: "),
    ],
    "gpqa_diamond": [
        (_gpqa("recZ1"), " carbon dioxide"),
        (_gpqa(" Which gas do plants take up? "), " carbon dioxide\nExplanation: Photosynthesis."),
    ],
    "gsm8k": [("Question: Two and two?\nAnswer:", " 2 + 2 = <<2+2=4>>4\n#### 4")],
    "math500": [("Problem:\nWhat is $1+1$?\n\nSolution:", " It is $\\boxed{2}$.")],
}


def write_jsonl(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def write_sets(folder: Path, rows: Rows = ROWS) -> Path:
    for name, held in rows.items():
        write_jsonl(folder / f"{name}.jsonl", held)
    return folder
