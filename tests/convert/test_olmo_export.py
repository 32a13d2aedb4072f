"""DepthBench's checkpoints to ours and back by the commands, tensor by tensor, and on to Hugging Face."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from tests.corpora import VOCAB, Corpus
from tests.harness import run_workers
from tests.reference import reference_logits

from .checkpoints import CASES, megatron_logits, run_of, saved
from .olmo_checkpoints import PUBLISHED, SHAPE, Convert, convert, drawn, their_config, their_tensors, write

TOKENS = torch.randint(SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
FLOAT32 = ("res_proj.weight", "res_norm.weight", "connection.b", "alpha_pre", "alpha_post", "alpha_res")


def published_tensors(name: str) -> dict[str, Tensor]:
    """In the published runs' types: bfloat16, but for depth reads and the fixed part of mHC's routing."""
    tensors = their_tensors(drawn(PUBLISHED[name]), PUBLISHED[name].architecture)
    return {n: t.float() if n.endswith(FLOAT32) else t.bfloat16() for n, t in tensors.items()}


def stored(folder: Path, prefix: str = "model.") -> dict[str, Tensor]:
    """All tensors of a distributed checkpoint, by torch's own reader."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert sorted(a) == sorted(b)
    for name, tensor in a.items():
        assert (tensor.shape, tensor.dtype) == (b[name].shape, b[name].dtype), name
        assert torch.equal(tensor, b[name]), name


def contains(whole: Any, part: Any) -> bool:
    """Whether nested settings hold all of another's, `_CLASS_` tags included."""
    if isinstance(part, dict):
        return all(key in whole and contains(whole[key], value) for key, value in part.items())
    return bool(whole == part)


def _there_and_back(rank: int, world_size: int, store: str, path: Path, out: Path, given: list[str]) -> list[Convert]:
    """Theirs -> ours -> theirs -> ours, in one process."""
    return [
        convert("import", path, out / "ours", "--no-verify", *given),
        convert("export", out / "ours", out / "theirs", "--format", "olmo"),
        convert("import", out / "theirs", out / "again", "--no-verify", *given),
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Bit by bit, both ways; the settings say the same in the same words."""
    published, tensors = PUBLISHED[name], published_tensors(name)
    path = write(tmp_path / "step9", their_config(published), tensors)
    given = ["--set", "readout=norm_then_sum"] if name == "hc" else []
    (said,) = run_workers(1, _there_and_back, path, tmp_path, given)
    assert [(each.code, each.err if each.code else "") for each in said] == [(0, "")] * 3
    assert "verified: settings and every tensor are read back equal" in said[1].out
    assert ("residual.readout=norm_then_sum is not written" in said[1].err) == (name == "hc")
    same(stored(tmp_path / "theirs" / "model_and_optim"), tensors)
    step = "checkpoints/step_00000000"
    same(stored(tmp_path / "ours" / step), stored(tmp_path / "again" / step))
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert contains(their_config(published)["model"], config["model"])
    assert config["model"]["block"]["name"] == published.block["name"]
    manifest = json.loads((tmp_path / "ours" / step / "manifest.json").read_text())
    assert manifest["origin"]["format"] == "DepthBench" and manifest["origin"]["step"] == 9


def _to_huggingface(rank: int, world_size: int, store: str, path: Path, out: Path) -> list[Convert]:
    return [
        convert("import", path, out / "ours"),
        convert("export", out / "ours", out / f"hf_{path.name}", "--dtype", "float32"),
    ]


@pytest.mark.parametrize("name", ["pre_ln", "block_attnres", "mhc", "moda"])
def test_on_to_hugging_face(name: str, tmp_path: Path) -> None:
    """What transformers computes is what the reference computes of the weights as they were stored."""
    published = PUBLISHED[name]
    weights = {n: w.float() for n, w in drawn(published).items()}
    path = write(tmp_path / name, their_config(published), their_tensors(weights, published.architecture))
    (said,) = run_workers(1, _to_huggingface, path, tmp_path)
    assert [(each.code, each.err if each.code else "") for each in said] == [(0, "")] * 2
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / f"hf_{name}", trust_remote_code=True, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        found = model(TOKENS, use_cache=False).logits
    exact = {n: w.double() for n, w in weights.items()}
    expected = reference_logits(exact, TOKENS, SHAPE, published.architecture, **published.options)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def _from_ours(rank: int, world_size: int, store: str, path: Path, out: Path) -> list[Convert]:
    return [
        convert("export", path, out / "theirs", "--format", "olmo"),
        convert("import", out / "theirs", out / "ours"),
    ]


def test_a_run_of_ours(corpus: Corpus, tmp_path: Path) -> None:
    """With its tokenizer, the padded vocabulary trimmed; grouped queries, odd sizes."""
    run = run_of(corpus, tmp_path / "run", CASES["lns"])
    saved(run)
    (said,) = run_workers(1, _from_ours, tmp_path / "run", tmp_path)
    assert [(each.code, each.err if each.code else "") for each in said] == [(0, "")] * 2
    assert "verified: logits at 64 positions agree to 0.0e+00" in said[1].out
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["dataset"]["tokenizer"]["vocab_size"] == VOCAB and config["model"]["vocab_size"] == VOCAB + 3
    assert config["model"]["block"]["sequence_mixer"]["head_dim"] == 76
    assert json.loads((tmp_path / "theirs" / ".metadata.json").read_text()) == {"version": "2.5.0"}
    assert (tmp_path / "ours" / "tokenizer" / "tokenizer.json").is_file()
    tokens = torch.randint(VOCAB + 3, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(megatron_logits(tmp_path / "run", tokens), megatron_logits(tmp_path / "ours", tokens))


def _refusals(rank: int, world_size: int, store: str, folders: list[Path], out: Path) -> list[Convert]:
    return [convert("export", folder, out / "theirs", "--format", "olmo") for folder in folders]


def test_what_their_code_cannot_compute(corpus: Corpus, tmp_path: Path) -> None:
    """Refused before anything is written, with what their code has."""
    cases = {
        "deepnorm": "model.rope_scaling",
        "sandwich_ln": "model.tie_embeddings=true: DepthBench's code has no tied head",
        "block_attnres": "residual.temperature=2.0: it has temperature=1.0 and no setting for it",
        "keel": "DepthBench's code has one eps for norm_eps, post_norm_eps; here they are [1e-06, 1e-05]",
    }
    change = {"block_attnres": {"sublayers_per_block": 3, "temperature": 2.0}, "keel": {"post_norm_eps": 1e-5}}
    for name in cases:
        case = CASES[name]
        residual = {**case.residual, **change.get(name, {})}
        model = {key: value for key, value in case.model.items() if name != "block_attnres"}
        saved(run_of(corpus, tmp_path / name, type(case)(residual, model, {})))
    (said,) = run_workers(1, _refusals, [tmp_path / name for name in cases], tmp_path)
    for each, message in zip(said, cases.values(), strict=True):
        assert each.code == 2 and message in each.err, each.err
    assert not (tmp_path / "theirs").exists() and not list(tmp_path.glob(".writing*"))
