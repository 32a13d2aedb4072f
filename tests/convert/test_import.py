"""Llamas and our own exports become checkpoints that compute the same, export to the same bytes, and can be trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from depthbench.checkpoint.inspect import inspect
from depthbench.config.load import load_run
from depthbench.convert import verify_import
from depthbench.convert.export import export as export_here
from depthbench.convert.hf.modeling_depthbench import DepthBenchForCausalLM
from depthbench.convert.importing import Import, import_model
from depthbench.convert.opening import open_source
from depthbench.convert.reading import Weights
from depthbench.convert.upcycle import upcycled
from depthbench.errors import UserError
from depthbench.training.preflight import preflight
from tests.corpora import Corpus, snapshot
from tests.harness import run_workers
from tests.training.test_resume import exact, training

from .checkpoints import CASES, Case, Said, megatron_logits, run_of, saved
from .importing import ROPE, as_transformers_4, import_, llama, transformers_logits

TOKENS = torch.randint(515, (2, 48), generator=torch.Generator().manual_seed(0))


def silent(line: str) -> None:
    assert "has no tokenizer" in line, line


def bring(source: Path, out: Path, **options: Any) -> Import:
    return import_model(open_source(source), out, warn=silent, **options)


KINDS: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4, "rope_parameters": ROPE["plain"]},
    "tied_sharded": {"tie_word_embeddings": True, "shard": "40KB"},
    "mistral": {"sliding_window": None, "head_dim": 10},
    "window_as_long_as_the_context": {"sliding_window": 64},
    **{kind: {"rope_parameters": ROPE[kind]} for kind in ("linear", "yarn", "llama3")},
}


FORMS = [(kind, form) for kind in KINDS for form in (5, 4) if form == 5 or kind in ROPE]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_a_llama_computes_the_same(tmp_path: Path, kind: str, form: int) -> None:
    """Read by Megatron-Core's reader into the trainer's model; config.json as transformers 5 and 4 write it."""
    source = llama(tmp_path / "llama", **KINDS[kind])
    if form == 4:
        as_transformers_4(source)
    bring(source, tmp_path / "out")
    theirs, ours = transformers_logits(source, TOKENS), megatron_logits(tmp_path / "out", TOKENS)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-5


def test_the_command_verifies(tmp_path: Path) -> None:
    source = llama(tmp_path / "llama", dtype=torch.bfloat16, tie_word_embeddings=True, rope_parameters=ROPE["llama3"])
    said = import_(source, tmp_path / "out")
    assert said.code == 0 and "verified: logits at 128 positions agree" in said.out
    assert "has no tokenizer" in said.err
    assert {tensor.dtype for tensor in inspect(tmp_path / "out").groups["model"]} == {torch.bfloat16}
    said = import_(source, tmp_path / "out", "--overwrite", "--dtype", "float32", "--no-verify")
    assert said.code == 0 and "verified" not in said.out
    assert {tensor.dtype for tensor in inspect(tmp_path / "out").groups["model"]} == {torch.float32}

    wide = llama(tmp_path / "wide")
    assert "verified" in import_(wide, tmp_path / "narrow", "--dtype", "bfloat16").out
    for residual, setting in (("hc", "num_streams=2"), ("block_attnres", "num_blocks=2")):
        said = import_(wide, tmp_path / residual, "--residual", residual, "--set", setting)
        assert said.code == 0 and "wrote" in said.out and agreement(said) <= 1e-5
    said = import_(wide, tmp_path / "keel", "--residual", "keel")
    assert said.code == 2 and "--allow-different" in said.err and not (tmp_path / "keel").exists()
    said = import_(wide, tmp_path / "keel", "--residual", "keel", "--allow-different")
    assert said.code == 0 and "another function, as said: logits at 128 positions differ by" in said.out


def agreement(said: Said) -> float:
    """The difference that verification measured and printed."""
    assert "verified: logits at " in said.out, said
    return float(said.out.rpartition("agree to ")[2].split()[0])


def wrong_block(factor: float) -> Callable[[], None]:
    """The import is read with a wrong weight."""

    def before() -> None:
        read = verify_import.Weights.read

        def wrong(self: Weights, name: str, *rest: Any) -> torch.Tensor:
            return read(self, name, *rest) * (factor if name == "blocks.2.mlp.down.weight" else 1)

        verify_import.Weights.read = wrong  # type: ignore[method-assign,assignment]

    return before


def test_verification_sees_what_is_wrong(tmp_path: Path) -> None:
    source = llama(tmp_path / "llama")
    said = import_(source, tmp_path / "out", before=wrong_block(1.2))
    assert said.code == 1 and "does not compute what its source does: logits differ by" in said.err
    assert (tmp_path / "out" / "model.yaml").is_file()


def test_float64_is_held_to_what_its_source_can_give(corpus: Corpus, tmp_path: Path) -> None:
    """A Llama's norms are in float32, whatever is made of it; an export's are not."""
    source = llama(tmp_path / "llama")
    said = import_(source, tmp_path / "hc", "--residual", "hc", "--dtype", "float64")
    assert said.code == 0 and 1e-9 < agreement(said) <= 1e-5, said

    case = Case(CASES["keel"].residual, CASES["keel"].model, {})
    saved(run_of(corpus, tmp_path / "run", case, precision="fp64"))
    export_here(tmp_path / "run", tmp_path / "export", warn=silent)
    said = import_(tmp_path / "export", tmp_path / "keel")
    assert said.code == 0 and agreement(said) <= 1e-9, said
    said = import_(tmp_path / "export", tmp_path / "wrong", before=wrong_block(1 + 1e-6))
    assert said.code == 1 and "does not compute what its source does" in said.err, said


def test_one_file_is_read_before_an_index(tmp_path: Path) -> None:
    """As transformers does: the shards beside it may be what was there before."""
    source = llama(tmp_path / "llama", shard="40KB")
    whole = {name: values * 1.5 for file in source.glob("model-*") for name, values in load_file(file).items()}
    save_file(whole, source / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(open_source(source).read("embedding.weight"), whole["model.embed_tokens.weight"])
    bring(source, tmp_path / "out")
    theirs, ours = transformers_logits(source, TOKENS), megatron_logits(tmp_path / "out", TOKENS)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-5


def test_a_llama_comes_back(tmp_path: Path) -> None:
    """With what Llama 3.2's smaller models have: tied, grouped heads of a size of their own, RoPE of type llama3."""
    source = llama(tmp_path / "llama", tie_word_embeddings=True, head_dim=10, rope_parameters=ROPE["llama3"])
    bring(source, tmp_path / "in")
    export_here(tmp_path / "in", tmp_path / "out", warn=lambda line: None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and "auto_map" not in config
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(values, after[name]) for name, values in before.items())
    assert torch.equal(transformers_logits(source, TOKENS), transformers_logits(tmp_path / "out", TOKENS))


BYTES = [(name, torch.float32) for name in CASES]
BYTES += [(name, torch.bfloat16) for name in ("pre_ln", "block_attnres", "mhc")]


@pytest.mark.parametrize(("name", "dtype"), BYTES)
def test_export_import_export_is_bit_equal(corpus: Corpus, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """All files but the card; of the tokenizer's the one that transformers reads."""
    own = Case(CASES[name].residual, CASES[name].model, {})
    saved(run_of(corpus, tmp_path / "run", own))
    export_here(tmp_path / "run", tmp_path / "first", dtype=dtype, warn=silent)
    done = bring(tmp_path / "first", tmp_path / "in")
    assert done.dtype is dtype
    export_here(tmp_path / "in", tmp_path / "second", warn=silent)
    first, second = snapshot(tmp_path / "first"), snapshot(tmp_path / "second")
    card = second.pop("README.md").decode()
    del first["README.md"], first["tokenizer.model"]
    assert first == second
    assert "Imported, not trained here" in card and "## Training" not in card and str(tmp_path / "first") in card


def test_what_transformers_saved_again(corpus: Corpus, tmp_path: Path) -> None:
    """As after fine-tuning: its own config.json, tensors in another order."""
    saved(run_of(corpus, tmp_path / "run", Case(CASES["mhc"].residual, CASES["mhc"].model, {})))
    export_here(tmp_path / "run", tmp_path / "first", warn=silent)
    DepthBenchForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "again")
    for folder in ("first", "again"):
        bring(tmp_path / folder, tmp_path / f"in_{folder}")
    one, other = Weights(tmp_path / "in_first"), Weights(tmp_path / "in_again")
    assert (one.run.model, one.run.residual, one.dtypes) == (other.run.model, other.run.residual, other.dtypes)
    for name, dtype in one.dtypes.items():
        assert torch.equal(one.read(name, one.shapes[name], dtype), other.read(name, one.shapes[name], dtype))


def test_half_precision_is_kept_or_widened(tmp_path: Path) -> None:
    """The narrowest type of a run that holds every weight exactly."""
    for stored, expected in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        source = llama(tmp_path / str(stored), dtype=stored)
        assert bring(source, tmp_path / f"in_{stored}").dtype is expected
    mixed = llama(tmp_path / "mixed", dtype=torch.bfloat16)
    tensors = load_file(mixed / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-6
    save_file(tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    assert bring(mixed, tmp_path / "in_mixed").dtype is torch.float32


def test_the_tokenizer_comes_along(corpus: Corpus, tmp_path: Path) -> None:
    source = llama(tmp_path / "llama")
    shutil.copy(corpus.tokenizer, source / "tokenizer.model")
    lines: list[str] = []
    done = import_model(open_source(source), tmp_path / "out", warn=lines.append)
    assert not lines and done.run.data.tokenizer == str(tmp_path / "out" / "tokenizer")
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.model").read_bytes() == Path(corpus.tokenizer).read_bytes()
    small = llama(tmp_path / "small", vocab_size=500)
    shutil.copy(corpus.tokenizer, small / "tokenizer.model")
    import_model(open_source(small), tmp_path / "out_small", warn=lines.append)
    assert lines == ["the tokenizer has 512 ids, more than the model's vocabulary of 500"]


def test_nan_is_named(tmp_path: Path) -> None:
    source = llama(tmp_path / "llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    lines: list[str] = []
    import_model(open_source(source), tmp_path / "out", warn=lines.append)
    assert "blocks.1.attention.k.weight has 1 elements of 1152 that are NaN or infinite" in lines


# -- training from it -------------------------------------------------------------------------------------------------
def run_file(corpus: Corpus, folder: Path, steps: int, **parallel: Any) -> str:
    """A run without a model of its own."""
    content = {
        "run_dir": str(folder / "run"),
        "parallel": {"distributed_optimizer": True, **parallel},
        "data": {"train": [{"prefix": corpus.train}], "tokenizer": corpus.tokenizer, "workers": 0},
        "optimizer": {"lr": 3e-3},
        "train": {"steps": steps, "global_batch": 4, "micro_batch": 2, "precision": "fp32", "eval_every": 0},
        "log": {"tensorboard": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "run.yaml")


TRAINED: dict[str, tuple[int, dict[str, Any]]] = {
    "block_attnres": (4, {"tensor": 2, "sequence": True, "pipeline": 2}),
    "hc": (1, {}),
}


@pytest.mark.parametrize("eps", [1e-12, 1e-5])
@pytest.mark.parametrize("residual", ["full_attnres", "block_attnres", "hc", "mhc"])
def test_an_upcycled_model_computes_the_same(tmp_path: Path, residual: str, eps: float) -> None:
    """As transformers' Llama, in the trainer's model; at any eps, since the settings that keep it come along."""
    source = llama(tmp_path / "llama", rms_norm_eps=eps)
    words = ["num_blocks=2"] if residual == "block_attnres" else []
    import_model(upcycled(open_source(source), residual, words, allow_different=False), tmp_path / "out", warn=silent)
    theirs, ours = transformers_logits(source, TOKENS), megatron_logits(tmp_path / "out", TOKENS)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-5


@pytest.mark.parametrize("residual", TRAINED)
def test_an_upcycled_model_trains(corpus: Corpus, tmp_path: Path, residual: str) -> None:
    """By its settings files, in one layout or another; its first loss is the Llama's, and falls."""
    source = open_source(llama(tmp_path / "llama"))
    losses = {}
    for name, steps, (processes, parallel) in (("pre_ln", 1, (1, {})), (residual, 8, TRAINED[residual])):
        out = tmp_path / name
        import_model(upcycled(source, name, [], allow_different=False), out, warn=silent)
        words = [f"model={out}/model.yaml", f"residual={out}/residual.yaml", f"initial={out}"]
        run = load_run(run_file(corpus, out, steps, **parallel), words)
        assert run_workers(processes, training, run) == [0] * processes
        losses[name] = [line["loss"] for line in exact(out / "run")]
    assert losses[residual][0] == pytest.approx(losses["pre_ln"][0], rel=1e-5)
    assert losses[residual][-1] < losses[residual][0] - 0.3


def test_a_run_in_the_import_itself_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "in"
    bring(llama(tmp_path / "llama"), out)
    words = [f"model={out}/model.yaml", f"residual={out}/residual.yaml", f"initial={out}", f"run_dir={out}"]
    run = load_run(run_file(corpus, out, 1), words)
    with pytest.raises(UserError, match="weights alone, no optimizer state"):
        preflight(run, 1, first_of_node=True)
    assert json.loads((out / "checkpoints" / "step_00000000" / "manifest.json").read_text())["weights_only"]
