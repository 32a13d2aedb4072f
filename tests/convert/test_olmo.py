"""Checkpoints of DepthBench's own code, written by the documented names, read as ours."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from depthbench.convert.olmo import OlmoSource, is_olmo
from depthbench.convert.olmo_config import write_model
from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.residual import Residual
from tests.harness import run_workers
from tests.models import load_weights, reference_name, small_run, start_stage
from tests.reference import reference_logits
from tests.residual.walk import logits_from, start

from .olmo_checkpoints import PUBLISHED, SHAPE, drawn, their_config, their_tensors, with_aliases, write

TOKENS = torch.randint(SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
Tensors = dict[str, Tensor]


def tensors_of(name: str) -> Tensors:
    return their_tensors(drawn(PUBLISHED[name]), PUBLISHED[name].architecture)


def written(folder: Path, name: str) -> Path:
    return write(folder, their_config(PUBLISHED[name]), tensors_of(name))


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as raised:
        OlmoSource(path)
    return str(raised.value)


def _logits(rank: int, world_size: int, store: str, path: Path) -> Tensor:
    source = OlmoSource(path)
    run = small_run(source.architecture, asdict(source.residual), model=asdict(source.model))
    stage = start_stage(rank, world_size, store, run)
    load_weights(stage, {reference_name(name): source.read(name) for name in source.dtypes})
    with torch.no_grad():
        return logits_from(stage, 0, start(stage, TOKENS))[..., : SHAPE.vocab_size].transpose(0, 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_imported_model_computes_the_reference(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    path = written(tmp_path / "step7", name)
    (ours,) = run_workers(1, _logits, path)
    weights = drawn(published)
    expected = reference_logits(weights, TOKENS, SHAPE, published.architecture, **published.options)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    source = OlmoSource(path)
    assert source.architecture == published.architecture
    assert source.residual == Residual.registry[published.architecture].Config(**published.residual)
    assert (source.model.sequence_length, source.model.rope_theta) == (16, 10000.0)
    assert set(source.dtypes.values()) == {torch.float64}
    assert source.origin["step"] == 7


def test_every_field_of_a_config_has_its_answer() -> None:
    """A field that is added to an architecture must be found in the format, or be said not to matter there."""
    no_matter = {"num_blocks", "init"}  # another way to say the block length; initial values
    for cls in Residual.registry.values():
        form = cls.olmo
        assert form is not None
        spoken = [*form.settings, *form.constants, *form.eps, *form.unsaid, *filter(None, [form.final_eps])]
        assert len(spoken) == len(set(spoken)), cls.name
        assert {field.name for field in fields(cls.Config)} - no_matter == set(spoken), cls.name


# -- tensors ----------------------------------------------------------------------------------------------------------
def test_types_are_kept(tmp_path: Path) -> None:
    """The published runs': bfloat16, and the queries of depth reads and their key norms in float32."""
    tensors = {n: t if "_res_" in n or n.startswith("res_") else t.bfloat16() for n, t in tensors_of("hc").items()}
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    stored = {n: t.float() if "res_" in n else t.bfloat16() for n, t in tensors_of("block_attnres").items()}
    source = OlmoSource(write(tmp_path, their_config(PUBLISHED["block_attnres"]), stored))
    kept = {name for name, dtype in source.dtypes.items() if dtype is torch.float32}
    assert kept == {name for name in source.dtypes if "depth_read" in name}
    query = source.read("blocks.1.mlp_residual.depth_read.query")
    assert torch.equal(query, stored["blocks.1.mlp_res_proj.weight"][0]) and query.dtype is torch.float32
    assert torch.equal(source.read("head.weight"), stored["lm_head.w_out.weight"])


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("name", ["hc", "mhc"])
def test_aliases_of_branches(name: str, drop: bool, tmp_path: Path) -> None:
    """A connector holds its branch too: its tensors may lie under both names, or under the connector's alone."""
    tensors = with_aliases(tensors_of(name), drop)
    assert any(".branch.attention.w_q." in key for key in tensors)
    assert ("blocks.0.attention.w_q.weight" in tensors) != drop
    source = OlmoSource(write(tmp_path, their_config(PUBLISHED[name]), tensors))
    for ours, weight in drawn(PUBLISHED[name]).items():
        assert torch.equal(source.read(ours), weight), ours


def test_aliases_that_differ(tmp_path: Path) -> None:
    tensors = with_aliases(tensors_of("hc"))
    alias = "blocks.1.feed_forward_hyper_connection.branch.feed_forward.w1.weight"
    tensors[alias] = tensors[alias] + 1e-9
    source = OlmoSource(write(tmp_path, their_config(PUBLISHED["hc"]), tensors))
    source.read("blocks.1.mlp.up.weight")
    with pytest.raises(UserError, match=f"blocks.1.feed_forward.w1.weight and {alias} are one tensor, but"):
        source.read("blocks.1.mlp.gate.weight")


@pytest.mark.parametrize(
    "name, extra, shape",
    [
        ("block_attnres", "blocks.0.attn_res_proj.weight", (1, 32)),
        ("block_attnres", "blocks.0.attn_res_norm.weight", (32,)),
        ("moda", "blocks.2.feed_forward.kv_proj.weight", (32, 32)),
    ],
)
def test_tensors_that_nothing_reads(name: str, extra: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {**tensors_of(name), extra: torch.zeros(shape)}
    source = OlmoSource(write(tmp_path, their_config(PUBLISHED[name]), tensors))
    assert not any(extra.endswith(name) for name in source.dtypes)


def without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def renamed(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("lns", without("blocks.2.attention.w_k.weight"), ["1 missing (blocks.2.attention.w_k.weight [16, 32])"]),
        (
            "sandwich_ln",
            renamed("post_attention_norm", "attention_post_norm"),
            [
                "3 missing (blocks.0.post_attention_norm.weight [32], blocks.1.post_attention_norm.weight [32], ",
                "3 left over (blocks.0.attention_post_norm.weight, ",
            ],
        ),
        (
            "keel",
            lambda tensors: tensors.update({"blocks.0.post_attention_norm.weight": torch.ones(32)}),
            ["1 left over (blocks.0.post_attention_norm.weight)"],
        ),
        (
            "pre_ln",
            lambda tensors: tensors.update({"embeddings.weight": torch.ones(64, 32)}),
            ["1 of another shape (embeddings.weight [64, 32] where [61, 32] is due)"],
        ),
        ("mhc", renamed("_hyper_connection.", "_connection."), ["30 missing (", ", and 26 more)", "30 left over ("]),
    ],
)
def test_names_and_shapes_that_do_not_fit(
    name: str, change: Callable[[Tensors], None], said: list[str], tmp_path: Path
) -> None:
    tensors = tensors_of(name)
    change(tensors)
    message = refusal(write(tmp_path, their_config(PUBLISHED[name]), tensors))
    assert "model_and_optim does not hold the tensors that its config.json describes: " in message
    for part in said:
        assert part in message


# -- settings ---------------------------------------------------------------------------------------------------------
Block = dict[str, Any]


def as_default(config: dict[str, Any], block: Block) -> None:
    block["name"] = "default"


def as_attn_res(config: dict[str, Any], block: Block) -> None:
    block["name"] = "attn_res"


def stray_moda_key(config: dict[str, Any], block: Block) -> None:
    config["model"]["block_overrides"] = {"2": {**copy.deepcopy(block), "moda_skip_ffn_kv": True}}
    block["moda_skip_ffn_kv"] = False


def attention_key(config: dict[str, Any], block: Block) -> None:
    block["attention"] = block.pop("sequence_mixer")


def without_block_size(config: dict[str, Any], block: Block) -> None:
    del block["attnres_block_size"]


def unset_switches(config: dict[str, Any], block: Block) -> None:
    block |= {"attnres_learn_logit_scale": False, "attnres_topk": None}


@pytest.mark.parametrize(
    "name, change",
    [
        ("full_attnres", as_default),
        ("block_attnres", as_default),
        ("block_attnres", as_attn_res),
        ("full_attnres", without_block_size),
        ("block_attnres", unset_switches),
        ("hc", as_default),
        ("mhc", as_default),
        ("pre_ln", stray_moda_key),
        ("lns", attention_key),
    ],
)
def test_settings_of_older_revisions(
    name: str, change: Callable[[dict[str, Any], Block], None], tmp_path: Path
) -> None:
    """They read as the newest one's do."""
    published, path = PUBLISHED[name], written(tmp_path, name)
    expected = OlmoSource(path)
    config = their_config(published)
    change(config, config["model"]["block"])
    (path / "config.json").write_text(json.dumps(config))
    found = OlmoSource(path)
    assert (found.architecture, found.residual) == (published.architecture, expected.residual)
    assert found.model == expected.model


def test_settings_of_an_architecture_are_read(tmp_path: Path) -> None:
    config, path = their_config(PUBLISHED["mhc"]), written(tmp_path, "mhc")
    config["model"]["block"]["hyper_connections"] |= {
        **{"sinkhorn_iters": 7, "liger_sinkhorn_eps": 1e-5, "liger_rms_eps": 1e-4, "collapse": "sum"},
    }
    for section in ("block", "lm_head"):
        config["model"][section]["layer_norm"]["eps"] = 1e-3
    del config["dataset"]["sequence_length"]
    config["train_module"] = {"max_sequence_length": 99}
    (path / "config.json").write_text(json.dumps(config))
    source = OlmoSource(path)
    found = source.residual
    assert (found.sinkhorn_iterations, found.sinkhorn_eps, found.coefficient_eps) == (7, 1e-5, 1e-4)
    assert (found.readout, found.norm_eps, found.num_streams) == ("sum_then_norm", 1e-3, 4)
    assert source.model.sequence_length == 99


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a dotted key of the config; None removes it."""

    def change(config: dict[str, Any]) -> None:
        *path, last = key.split(".")
        for part in path:
            config = config.setdefault(part, {})
        if value is None:
            del config[last]
        else:
            config[last] = value

    return change


MIXER = "model.block.sequence_mixer"
RMS = {"name": "rms", "eps": 1e-6, "bias": False}
NOT_OURS = {
    "pre_ln": [
        (
            put("model.block.name", "reordered_norm"),
            "the block type 'reordered_norm' is not supported; there are ",
        ),
        (put(f"{MIXER}.qk_norm", RMS), "model.block.sequence_mixer.qk_norm.name='rms' is not known"),
        (
            put(f"{MIXER}.sliding_window", {"pattern": [4096]}),
            "sequence_mixer.sliding_window.pattern=[4096] is not known",
        ),
        (put(f"{MIXER}._CLASS_", "olmo_core.nn.attention.GatedDeltaNetConfig"), "is 'GatedDeltaNetConfig', must be"),
        (put(f"{MIXER}.bias", None), "model.block.sequence_mixer.bias is absent, must be False"),
        (put(f"{MIXER}.rope", None), "lacks model.block.sequence_mixer.rope.theta"),
        (put(f"{MIXER}.rope.scaling", {"factor": 2.0}), "rope.scaling.factor=2.0 is not known"),
        (put("model.block.feed_forward.activation", "gelu_tanh"), "is 'gelu_tanh', must be 'silu' or absent"),
        (put("model.block.layer_norm.name", "default"), "model.block.layer_norm.name is 'default', must be 'rms'"),
        (put("model.lm_head.layer_norm.eps", 1e-5), "eps=1e-06 but model.lm_head.layer_norm.eps=1e-05; depthbench has"),
        (put("model.embed_scale", 5.6), "model.embed_scale is 5.6, must be absent or 1.0"),
        (put("model.block_overrides", {"1": {"name": "keel"}}), "model.block_overrides.1 differs from model.block in"),
        (put("model.block", "default"), "model.block must be one mapping"),
        (put("model.n_layers", None), "lacks model.n_layers"),
        (put("model", None), "has no section `model`"),
    ],
    "deepnorm": [(put("model.block.layer_norm.name", "rms"), "is 'rms', must be 'default'")],
    "block_attnres": [
        (put("model.block.attnres_learn_logit_scale", True), "model.block.attnres_learn_logit_scale=True is not known")
    ],
    "hc": [(put("model.block.hyper_connections.tanh", False), "is False, must be absent or True")],
    "mhc": [
        (put("model.block.hyper_connections.kind", "mhc_static"), "kind is 'mhc_static', must be 'liger_mhc'"),
        (put("model.block.hyper_connections.collapse", "max"), "='max' must be one of 'auto', 'mean', 'sum'"),
        (put("model.block.hyper_connections.liger_pre_eps", 0.1), "liger_pre_eps is 0.1, must be 0.0 or absent"),
    ],
    "moda": [(put("model.block.moda.attention_scale", 0.5), "attention_scale is 0.5, must be absent")],
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_models_that_are_not_ours(name: str, tmp_path: Path) -> None:
    """Each says what the config has and what would do."""
    path = written(tmp_path, name)
    for change, said in NOT_OURS[name]:
        config = their_config(PUBLISHED[name])
        change(config)
        (path / "config.json").write_text(json.dumps(config))
        message = refusal(path)
        assert said in message and str(path / "config.json") in message


def test_an_architecture_without_such_a_format(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, lns = written(tmp_path, "lns"), Residual.registry["lns"]
    monkeypatch.setattr(lns, "olmo", None)
    assert "the block type 'default_scaled' is not supported" in refusal(path)
    model = ModelConfig(2, 32, 48, 4, 61)
    with pytest.raises(UserError, match="DepthBench's code has no lns; it has block_attnres, deepnorm"):
        write_model(model, lns(lns.Config(), model.residual_shape), "float32")


# -- folders ----------------------------------------------------------------------------------------------------------
def test_a_run_is_its_newest_step(tmp_path: Path) -> None:
    for step in (3, 20, 100):
        written(tmp_path / f"step{step}", "pre_ln")
    (tmp_path / "step100" / "model_and_optim" / ".metadata").unlink()  # it was not finished
    (tmp_path / "tokenizer").mkdir()
    assert is_olmo(tmp_path) and is_olmo(tmp_path / "step3") and not is_olmo(tmp_path / "tokenizer")
    source = OlmoSource(tmp_path)
    assert (source.folder.name, source.origin["step"]) == ("step20", 20)
    assert source.tokenizer == tmp_path / "tokenizer"
    assert OlmoSource(tmp_path / "step3").origin["step"] == 3


def test_folders_that_hold_none(tmp_path: Path) -> None:
    path = written(tmp_path / "run" / "step5", "pre_ln")
    assert "expected config.json and model_and_optim/ in it, or in folders step1000" in refusal(tmp_path)
    assert "expected config.json" in refusal(path / "model_and_optim")
    (path / "config.json").unlink()
    assert "config.json cannot be read" in refusal(path)
    written(path, "pre_ln")
    file = next((path / "model_and_optim").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:100])
    assert f"{file.name} has 100 bytes where" in refusal(path)
    file.unlink()
    assert f"{file.name} is missing" in refusal(path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run by a pickle",)


def test_metadata_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "pre_ln")
    (path / "model_and_optim" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    assert ".metadata cannot be read (it names builtins.print)" in refusal(path)
    assert not capsys.readouterr().out
