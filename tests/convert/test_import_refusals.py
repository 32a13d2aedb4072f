"""What is no model of ours is refused by name, and what goes wrong leaves nothing that looks whole."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthbench.convert.export import export as export_here
from depthbench.convert.importing import import_model
from depthbench.convert.opening import open_source
from depthbench.errors import UserError
from tests.corpora import Corpus, snapshot

from .checkpoints import CASES, run_of, saved
from .importing import change, import_, llama

CONFIGURATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("family", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, r"model_type is 'qwen2'"),
    ("class", {"architectures": ["LlamaForSequenceClassification"]}, r"its class is LlamaForSequenceClassification"),
    ("activation", {"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
    ("biases", {"attention_bias": True, "mlp_bias": True}, r"attention_bias is True; mlp_bias is True"),
    ("quantised", {"quantization_config": {"quant_method": "gptq"}}, r"its weights are quantised"),
    ("experts", {"num_local_experts": 8}, r"num_local_experts is 8"),
    (
        "window",
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32},
        r"is 32, shor",
    ),
    ("window left out", {"model_type": "mistral", "architectures": None, "max_position_embeddings": 8192}, r"is 4096"),
    ("partial rotary", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
    ("rope", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, r"rope_type is 'longrope'"),
    ("rope of 4", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"type is 'dynamic'"),
    ("yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, r"RoPE of type yarn has mscale"),
    (
        "yarn's temperature",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0}},
        r"attention_factor=1\.0 \(ours is .* = 1\.0693\)",
    ),
    ("shape", {"hidden_size": None}, r"no hidden_size"),
    ("heads", {"num_key_value_heads": 3}, r"num_attention_heads=4 is not a multiple of model\.num_kv_heads=3"),
    ("nothing", {"model_type": None, "architectures": None}, r"neither model_type nor architectures"),
]


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llamas")
    llama(folder / "one")
    llama(folder / "sharded", shard="40KB")
    return folder


@pytest.fixture
def own(llamas: Path, tmp_path: Path) -> Path:
    """A copy of the Llama in one file, to break."""
    return copied(llamas / "one", tmp_path / "llama")


def copied(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("settings", "message"), [case[1:] for case in CONFIGURATIONS], ids=[case[0] for case in CONFIGURATIONS]
)
def test_configurations(own: Path, settings: dict[str, Any], message: str) -> None:
    change(own, **settings)
    with pytest.raises(UserError, match=message) as caught:
        open_source(own)
    known = ("not a multiple", "neither")
    assert "Supported are LlamaForCausalLM, Mistral" in str(caught.value) or any(k in message for k in (*known, "ours"))


def tensors_changed(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def several(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)  # a buffer of old versions: no fault
    tensors["model.norm.weight"] = torch.ones(47)


def test_tensors_are_listed(own: Path) -> None:
    tensors_changed(own, several)
    with pytest.raises(UserError) as caught:
        open_source(own)
    for fault in (
        "model.layers.2.mlp.up_proj.weight is missing",
        "lm_head.weight is missing",
        "model.layers.0.self_attn.q_proj.bias belongs to no part of the model",
        "model.norm.weight has shape (47,), config.json makes it (48,)",
    ):
        assert fault in str(caught.value)
    assert "inv_freq" not in str(caught.value)


def test_a_tied_head_may_be_stored(own: Path) -> None:
    change(own, tie_word_embeddings=True)
    assert "head.weight" not in open_source(own).dtypes


def test_weight_files(llamas: Path, own: Path, tmp_path: Path) -> None:
    sharded = copied(llamas / "sharded", tmp_path / "sharded")
    names = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    for name in names[:2]:
        (sharded / name).unlink()
    with pytest.raises(UserError, match=rf"lacks 2 of {len(names)} weight files: {names[0]}, {names[1]}"):
        open_source(sharded)

    whole = (own / "model.safetensors").read_bytes()
    (own / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read as safetensors"):
        open_source(own)
    (own / "model.safetensors").rename(own / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"neither model\.safetensors nor .*pytorch_model\.bin, a pickle"):
        open_source(own)
    (own / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not valid JSON"):
        open_source(own)
    (own / "config.json").unlink()
    with pytest.raises(UserError, match=r"has a config\.json, .* and both are missing"):
        open_source(own)
    with pytest.raises(UserError, match="no folder"):
        open_source(tmp_path / "nowhere")


def test_quantised_tensors(own: Path) -> None:
    tensors_changed(own, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight is stored as I8"):
        open_source(own)


@pytest.fixture(scope="module")
def exported(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    saved(run_of(corpus, folder / "run", CASES["mhc"]))
    export_here(folder / "run", folder / "export", warn=lambda line: None)
    return folder / "export"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residual_architecture": "attnres"}, "no residual architecture 'attnres'; nearest is"),
        ({"residual": {"streams": 4}}, r"unknown key residual\.streams"),
        ({"position_scaling": {"kind": "magic", "factor": 1.0}}, r"model\.rope_scaling\.kind='magic'"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\.\S+ is missing"),
    ],
)
def test_exports_that_do_not_fit(exported: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    export = copied(exported, tmp_path / "export")
    change(export, **settings)
    with pytest.raises(UserError, match=message):
        open_source(export)


# -- what is in the way -----------------------------------------------------------------------------------------------
def bring(source: Path, out: Path, **options: Any) -> None:
    import_model(open_source(source), out, warn=lambda line: None, **options)


def test_a_folder_that_is_in_the_way(llamas: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    bring(llamas / "one", out)  # empty: fine
    before = snapshot(out)
    with pytest.raises(UserError, match=r"is not empty .* or --overwrite"):
        bring(llamas / "one", out)
    bring(llamas / "sharded", out, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert before.keys() == snapshot(out).keys()

    newer = out / "checkpoints" / "step_00000120"
    newer.mkdir()
    (newer / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by this command: --overwrite does not remove it"):
        bring(llamas / "one", out, overwrite=True)
    (out / "model.yaml").unlink()
    with pytest.raises(UserError, match="was not written by this command"):
        bring(llamas / "one", out, overwrite=True)


FULL = [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    # what torch 2.13 said on a full tmpfs
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), "is the disk full"),
]


@pytest.mark.parametrize(("error", "message"), FULL)
def test_a_full_disk_leaves_nothing(
    llamas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "save", full)  # by which torch's writer writes each tensor
    with pytest.raises(UserError, match=rf"cannot write the import .*{message}.*; nothing is left there"):
        bring(llamas / "one", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_is_wrong(llamas: Path, own: Path, tmp_path: Path) -> None:
    change(own, hidden_act="relu")
    said = import_(own, tmp_path / "out")
    assert said.code == 2 and "hidden_act is 'relu'" in said.err and "Supported are" in said.err
    assert not (tmp_path / "out").exists()
    assert json.loads((own / "config.json").read_text())["hidden_act"] == "relu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--allow-different"], "--allow-different needs --residual"),
        (["--text", "some.txt"], "leaves nothing open that a text could tell"),
        (["--residual", "hc", "--text", "some.txt"], "leaves nothing open that a text could tell"),
    ],
)
def test_options_that_would_do_nothing(llamas: Path, tmp_path: Path, words: list[str], message: str) -> None:
    said = import_(llamas / "one", tmp_path / "out", *words)
    assert said.code == 2 and message in said.err and not (tmp_path / "out").exists()
