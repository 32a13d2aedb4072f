"""Ten architectures, trained for a few steps, exported, and loaded where there is no depthbench and no Megatron."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.config.schema import RunConfig
from depthbench.data.tokenizers import load_tokenizer
from tests.corpora import Corpus

from .checkpoints import CASES, TRAINED, Case, all_saved, export, megatron, megatron_logits, run_of, trained

Answers = dict[str, dict[str, Any]]
FRESH = Path(__file__).with_name("fresh.py")
OLD = os.environ.get("DEPTHBENCH_TRANSFORMERS_457")
OTHERS = [*(f"{name}-fp64" for name in CASES), *(f"{name}-bf16" for name in ("pre_ln", "block_attnres", "mhc"))]
SHARDED = "moda"
VERSIONS = {"installed": "", "4.57": OLD or ""}
WIDTHS = {"fp64": ["torch.float64"], "bf16": ["torch.bfloat16"]}
ATTNRES, MHC = ("key_norm", "query"), ("bias", "scale_post", "scale_pre", "scale_res")
FLOAT32 = {"full_attnres": ATTNRES, "block_attnres": ATTNRES, "mhc": MHC}
INITIAL = {
    "full_attnres": {"query": [0.0, 0.0], "key_norm": [1.0, 1.0]},
    "block_attnres": {"query": [0.0, 0.0], "key_norm": [1.0, 1.0]},
    "hc": {"static_alpha": [0.0, 1.0], "static_beta": [1.0, 1.0], "dynamic_alpha_scale": [0.01, 0.01]},
    "mhc": {"phi": [0.0, 0.0], "bias": [-8.0, 8.0], "scale_res": [0.01, 0.01]},
}


@pytest.fixture(scope="module")
def exports(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten run folders under `runs`, ten exports beside it under the same names."""
    folder = tmp_path_factory.mktemp("exports")
    trained([run_of(corpus, folder / "runs" / name, case) for name, case in TRAINED.items()], 4)
    for name in CASES:
        shards = ["--max-shard-size", "60KB"] if name == SHARDED else []
        said = export(folder / "runs" / name, folder / name, *shards)
        assert said.code == 0, said.err
        assert "verified: logits at 64 positions agree" in said.out
    return folder


@pytest.fixture(scope="module")
def others(corpus: Corpus, exports: Path) -> list[str]:
    """Ten exports in float64, of runs that were trained as those of `exports` were, and three in bfloat16, of models
    that were not trained, beside those of `exports`."""
    runs = exports / "runs"

    def run(name: str, cases: dict[str, Case], **train: Any) -> RunConfig:
        architecture, _, precision = name.partition("-")
        return run_of(corpus, runs / name, cases[architecture], precision=precision, **train)

    wide = [name for name in OTHERS if name.endswith("-fp64")]
    trained([run(name, TRAINED, eval_every=0) for name in wide], 4)
    single = {name: Case(case.residual, case.model, {}) for name, case in CASES.items()}
    all_saved([run(name, single) for name in OTHERS if name not in wide])
    for name in OTHERS:
        said = export(runs / name, exports / name, "--no-verify")
        assert said.code == 0, said.err
    return OTHERS


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    if request.param == "4.57" and not OLD:
        pytest.skip("DEPTHBENCH_TRANSFORMERS_457 names no folder with transformers 4.57")
    return str(request.param)


@pytest.fixture(scope="module")
def found(exports: Path, others: list[str], version: str, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What a fresh interpreter says of all."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    environment = {**os.environ, "PYTHONPATH": VERSIONS[version], "PYTHONSAFEPATH": "1"}
    folders = [str(exports / name) for name in [*CASES, *others]]
    command = [sys.executable, str(FRESH), str(elsewhere / "answers"), *folders]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: Answers = torch.load(elsewhere / "answers", weights_only=True)
    return answers


def apart(theirs: Tensor, ours: Tensor) -> float:
    assert theirs.shape == ours.shape
    return float((theirs - ours).abs().max() / ours.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_loaded_without_depthbench(exports: Path, corpus: Corpus, found: Answers, version: str, name: str) -> None:
    said = found[name]
    assert said["importable"] == [] and said["network"] == []
    if version != "installed":
        assert said["version"].startswith(version)
    assert said["class"] == ("LlamaForCausalLM" if name == "pre_ln" else "DepthBenchForCausalLM")
    assert said["backend"]
    ours, states = megatron(exports / "runs" / name, said["tokens"])
    assert apart(said["logits"], ours) <= 1e-5
    assert len(said["states"]) == 5  # the last one is checked to be the input of the head
    for number, (theirs, wanted) in enumerate(zip(said["states"][:-1], states[:-1], strict=True)):
        assert apart(theirs, wanted) <= 1e-5, number

    for same in ("eager", "split", "kept", "last state", "base", "left", "right", "loss", "checkpointed"):
        assert said[same] <= 1e-5, same
    for holds in ("cached", "beams", "static", "padded generation", "saved again"):
        assert said[holds], holds
    assert said["losses"] == sorted(said["losses"], reverse=True)
    assert 0 < said["bf16"] < 0.1
    assert tuple(sorted({path.rpartition(".")[2] for path in said["float32 in bf16"]})) == FLOAT32.get(name, ())

    for parameter, values in {"norm": [1.0, 1.0], **INITIAL.get(name, {})}.items():
        assert said["initial"][parameter] == pytest.approx(values), parameter
    assert all(-1 < low <= high < 1 for short, (low, high) in said["initial"].items() if short.endswith("_proj"))

    tokenizer = load_tokenizer(corpus.tokenizer)
    assert said["ids"] == tokenizer.encode_batch([said["text"]])[0]
    assert said["eos"] == (tokenizer.eod,) * 3


@pytest.mark.parametrize("name", OTHERS)
def test_other_precisions(exports: Path, found: Answers, name: str) -> None:
    """Llama's norms and rotations are in float32 whatever the rest is; bfloat16 rounds in another order."""
    case, _, precision = name.partition("-")
    said, ours = found[name], megatron_logits(exports / "runs" / name, found[name]["tokens"])
    assert said["types"] == WIDTHS[precision] + (["torch.float32"] if precision == "bf16" and case in FLOAT32 else [])
    tolerance = {"fp64": 1e-9 if case != "pre_ln" else 1e-5, "bf16": 2e-2}[precision]
    assert apart(said["logits"], ours) <= tolerance
    assert said["cached"]


def imports(text: str) -> set[str]:
    """The top-level packages that a file imports, siblings left out."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).partition(".")[0])
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_is_written(exports: Path, name: str) -> None:
    """Trimmed tables, a tied head not stored, code that knows torch and transformers alone, a card."""
    folder = exports / name
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"]) == (515, "float32")
    code = sorted(path.name for path in folder.glob("*.py"))
    if name == "pre_ln":
        assert "auto_map" not in config and not code
    else:
        assert {f"{value.partition('.')[0]}.py" for value in config["auto_map"].values()} < set(code)
        imported = {module for path in code for module in imports((folder / path).read_text())}
        assert imported - set(sys.stdlib_module_names) == {"torch", "transformers"}
        texts = {path: (folder / path).read_text() for path in code}
        # the one form by which transformers finds files; 4.57 copies those alone that the modeling file names
        assert not any(re.search(r"^\s*(from \.+ import|import \.)", text, re.MULTILINE) for text in texts.values())
        named = set(re.findall(r"^from \.(\w+) import", texts["modeling_depthbench.py"], re.MULTILINE))
        assert {f"{module}.py" for module in named} == set(code) - {"modeling_depthbench.py"}
        assert ("moda.py" in code, "sinkhorn.py" in code) == (name == "moda", name == "mhc")
    card = (folder / "README.md").read_text()
    for line in ("step 3", "| training loss |", "| validation loss |", "topics_train x 1", "commit", "data.train doc"):
        assert line in card, line
    files = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer.model"}
    files.add("model.safetensors.index.json" if name == SHARDED else "model.safetensors")
    assert files <= {path.name for path in folder.iterdir()}
