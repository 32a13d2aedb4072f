"""Verification runs by default, and names the block that is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from depthbench.convert import export as export_module
from depthbench.convert.export import export as export_here
from depthbench.convert.names import Exported
from depthbench.convert.weight_files import INDEX
from depthbench.residual import Residual
from tests.corpora import Corpus

from .checkpoints import CASES, Case, export, run_of, saved

BLOCK = 1


def change_tensor(tensor_name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Exports get one tensor other than the checkpoint's."""
    write = export_module.write_shards

    def broken(folder: Path, tensors: list[Exported], limit: int, read: object) -> None:
        def changed(tensor: Exported) -> Tensor:
            values: Tensor = read(tensor)  # type: ignore[operator]
            return change(values) if tensor.name == tensor_name else values

        write(folder, tensors, limit, changed)

    export_module.write_shards = broken  # type: ignore[assignment]


def scale_of(tensor_name: str) -> None:
    """2 % larger."""
    change_tensor(tensor_name, lambda values: values * 1.02)


def scale_of_a_norm() -> None:
    scale_of(f"model.layers.{BLOCK}.mlp_residual.norm.weight")


def scale_of_a_llama_projection() -> None:
    scale_of(f"model.layers.{BLOCK}.self_attn.v_proj.weight")


def scale_of_a_depth_projection() -> None:
    """Its output is in no block's newest representation, but in what later blocks attend to."""
    scale_of(f"model.layers.{BLOCK}.mlp.extra.depth_k.weight")


def scale_of_the_head() -> None:
    scale_of("lm_head.weight")


def scale_of_the_embedding() -> None:
    scale_of("model.embed_tokens.weight")


def change_code(file: str, right: str, wrong: str) -> None:
    """Exports get `wrong` for `right` in a file of theirs."""
    original = export_module.code_files

    def broken(residual: Residual) -> dict[str, str]:
        files = original(residual)
        assert right in files[file]
        return {**files, file: files[file].replace(right, wrong)}

    export_module.code_files = broken


def constant_in_the_code() -> None:
    """LNS as a converter takes it that does not know it, from one block on."""
    right = "1 / math.sqrt(block + 1)"
    change_code("lns.py", right, f"{right} if block < {BLOCK} else 1.0")


@pytest.mark.parametrize(
    ("name", "tamper"),
    [
        ("pre_ln", scale_of_a_llama_projection),
        ("hc", scale_of_a_norm),
        ("moda", scale_of_a_norm),
        ("moda", scale_of_a_depth_projection),
        ("block_attnres", scale_of_a_norm),
        ("lns", constant_in_the_code),
    ],
)
def test_a_broken_scale(corpus: Corpus, tmp_path: Path, name: str, tamper: object) -> None:
    case = CASES[name]
    run = saved(run_of(corpus, tmp_path / "run", case), case.processes)
    out = tmp_path / "out"
    said = export(run, out, before=tamper)  # type: ignore[arg-type]
    assert said.code == 1
    assert f"block {BLOCK} is the first that differs" in said.err
    assert "The files are kept" in said.err and (out / "model.safetensors").is_file()
    assert export(run, out, "--overwrite").code == 0
    assert export(run, out, "--overwrite", "--no-verify", before=tamper).code == 0  # type: ignore[arg-type]


def test_a_wrong_head(corpus: Corpus, tmp_path: Path) -> None:
    run = saved(run_of(corpus, tmp_path / "run", CASES["keel"]))
    said = export(run, tmp_path / "out", before=scale_of_the_head)
    assert said.code == 1
    assert "every block agrees, so it is the final norm or the head" in said.err


def louder(key: str, values: Tensor) -> None:
    if ".norm." not in key and ("attention." in key or "mlp." in key):
        values *= 6


def rounding_of_the_embedding() -> None:
    """By a few units in the last place, as other kernels round: there are CPUs on which both models are equal bit by
    bit."""
    noise = torch.Generator().manual_seed(0)
    change_tensor("model.embed_tokens.weight", lambda v: v * (1 + 5e-7 * torch.randn(v.shape, generator=noise)))


def test_a_model_that_amplifies_rounding(corpus: Corpus, tmp_path: Path) -> None:
    """Logits differ visibly and nothing is wrong: blocks are judged one by one."""
    case = Case(CASES["sandwich_ln"].residual, {"num_layers": 24}, {})
    run = saved(run_of(corpus, tmp_path / "run", case), change=louder)
    said = export(run, tmp_path / "out", before=rounding_of_the_embedding)
    assert said.code == 0 and "verified block by block: given the same, each agrees" in said.out, said
    said = export(run, tmp_path / "out", "--overwrite", before=scale_of_a_norm)
    assert said.code == 1 and f"block {BLOCK} is the first that differs" in said.err
    assert "given the same, all others agree" in said.err


def another_state_in_the_code() -> None:
    """A block that leaves a tensor which the source's does not have."""
    right = "return self.mlp_residual.write(state, read, y, taps)"
    wrong = f"""if self.self_attn.layer_idx == {BLOCK}:
            return state._replace(live={{**state.live, "more": y}})
        {right}"""
    change_code("layers_depthbench.py", right, wrong)


def test_another_depth_state(corpus: Corpus, tmp_path: Path) -> None:
    run = saved(run_of(corpus, tmp_path / "run", CASES["keel"]))
    said = export(run, tmp_path / "out", before=another_state_in_the_code)
    assert said.code == 1 and f"block {BLOCK} is the first that differs, by inf" in said.err, said


def test_a_wrong_embedding(corpus: Corpus, tmp_path: Path) -> None:
    run = saved(run_of(corpus, tmp_path / "run", CASES["mhc"]))
    said = export(run, tmp_path / "out", before=scale_of_the_embedding)
    assert said.code == 1 and "the embedding differs, by 2.0e-02 of its largest" in said.err


def files_changed(change: Callable[[dict[str, Tensor]], None]) -> Callable[[], None]:
    def before() -> None:
        write = export_module.write_shards

        def changed(folder: Path, *args: Any, **options: Any) -> None:
            write(folder, *args, **options)
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        export_module.write_shards = changed

    return before


def test_files_that_are_not_the_models(corpus: Corpus, tmp_path: Path) -> None:
    """A tensor missing, one too many, one of another shape; a tied head stored besides."""
    name = "model.layers.1.mlp.up_proj.weight"

    def missing(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    def besides(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.7.norm.weight"] = torch.ones(3)

    def smaller(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].clone()

    def head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    run = saved(run_of(corpus, tmp_path / "run", CASES["sandwich_ln"]))
    for change, fault in (
        (missing, f"{name} is missing"),
        (besides, "model.layers.7.norm.weight belongs to no part of the model"),
        (smaller, f"{name} has shape (47, 48), the model makes it (48, 48)"),
        (head, "lm_head.weight belongs to no part of the model"),
    ):
        said = export(run, tmp_path / "out", "--overwrite", before=files_changed(change))
        assert said.code == 1 and f"the export's files are not its model's: {fault}" in said.err, said
        assert (tmp_path / "out" / "config.json").is_file()


def wrong_index() -> None:
    write = export_module.write_shards

    def changed(folder: Path, *args: Any, **options: Any) -> None:
        write(folder, *args, **options)
        index = json.loads((folder / INDEX).read_text())
        places = index["weight_map"]
        places["model.layers.0.mlp.up_proj.weight"] = places["model.layers.2.mlp.down_proj.weight"]
        (folder / INDEX).write_text(json.dumps(index))

    export_module.write_shards = changed


def test_an_index_that_is_wrong(corpus: Corpus, tmp_path: Path) -> None:
    run = saved(run_of(corpus, tmp_path / "run", CASES["keel"]))
    said = export(run, tmp_path / "out", "--max-shard-size", "60KB", before=wrong_index)
    assert said.code == 1 and "model.layers.0.mlp.up_proj.weight is not where the index says" in said.err, said


def settings_changed(**changes: Any) -> Callable[[], None]:
    def before() -> None:
        original = export_module.model_config

        def changed(*args: Any) -> dict[str, Any]:
            return {**original(*args), **changes}

        export_module.model_config = changed  # type: ignore[assignment]

    return before


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("pre_ln", {"rms_norm_eps": 1e-5}, "residual is PreLNConfig(norm_eps=1e-05) in config.json"),
        ("pre_ln", {"rope_theta": 501.0}, "RoPE is theta 501, None in config.json, theta 500, None in the checkpoint"),
        ("keel", {"rope_theta": 501.0}, "RoPE is theta 501"),
        ("keel", {"residual": {"norm_eps": 1e-5}}, "residual is KEELConfig(norm_eps=1e-05"),
        ("deepnorm", {"position_scaling": None}, "RoPE is theta 10000, None in config.json, theta 10000, RopeScaling("),
        ("keel", {"max_position_embeddings": 16}, "model.sequence_length is 16 in config.json, 32 in the checkpoint"),
    ],
)
def test_settings_too_small_to_see(
    corpus: Corpus, tmp_path: Path, name: str, changes: dict[str, Any], fault: str
) -> None:
    """What may not show in logits on a few tokens."""
    run = saved(run_of(corpus, tmp_path / "run", Case(CASES[name].residual, CASES[name].model, {})))
    said = export(run, tmp_path / "out", before=settings_changed(**changes))
    assert said.code == 1 and fault in said.err, said


def test_float64_is_held_to_more(corpus: Corpus, tmp_path: Path) -> None:
    """A difference that float32 could not have told from rounding."""

    def barely(tensors: dict[str, Tensor]) -> None:
        tensors[f"model.layers.{BLOCK}.self_attn.v_proj.weight"] *= 1 + 1e-7

    run = saved(run_of(corpus, tmp_path / "run", CASES["mhc"], precision="fp64"))
    said = export(run, tmp_path / "out", before=files_changed(barely))
    assert said.code == 1 and f"block {BLOCK} is the first that differs" in said.err
    said = export(run, tmp_path / "out", "--overwrite", "--dtype", "float32", before=files_changed(barely))
    assert said.code == 0


SCALINGS = {
    "linear": {"kind": "linear", "factor": 4.0},
    "ntk": {"kind": "ntk", "factor": 4.0},
    "yarn": {"kind": "yarn", "factor": 4.0, "original_sequence_length": 16, "beta_fast": 8.0},
    "llama3": {"kind": "llama3", "factor": 8.0, "original_sequence_length": 16, "high_freq_factor": 3.0},
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", ["pre_ln", "sandwich_ln"])
def test_scaled_positions(corpus: Corpus, tmp_path: Path, name: str, kind: str) -> None:
    """In transformers' own Llama and in ours."""
    scaled = {"rope_scaling": SCALINGS[kind], "num_layers": 1}
    run = saved(run_of(corpus, tmp_path / "run", Case(CASES[name].residual, scaled, {})))
    said = export(run, tmp_path / "out")
    assert said.code == 0, said.err


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("fp64", 1e-9)])
def test_a_width_that_llama_refuses(corpus: Corpus, tmp_path: Path, precision: str, tolerance: float) -> None:
    """Pre-LN comes with code then, whose norms are in the model's type."""
    shape = {"num_layers": 2, "num_attention_heads": 5, "num_kv_heads": 1, "head_dim": 94}
    run = saved(run_of(corpus, tmp_path / "run", Case(CASES["pre_ln"].residual, shape, {}), precision=precision))
    said = export(run, tmp_path / "out")
    assert said.code == 0, said.err
    assert (tmp_path / "out" / "pre_ln.py").is_file()
    assert float(said.out.rpartition("agree to ")[2].split()[0]) <= tolerance


def test_nan_is_named_and_does_not_verify(corpus: Corpus, tmp_path: Path) -> None:
    def spoil(key: str, values: Tensor) -> None:
        if key == "model.blocks.1.mlp.up.weight":
            values[3, 5] = float("nan")

    run = saved(run_of(corpus, tmp_path / "run", CASES["hc"]), change=spoil)
    said = export(run, tmp_path / "out")
    assert "blocks.1.mlp.up.weight has 1 elements of" in said.err
    assert said.code == 1 and "block 1 is the first that differs, by nan" in said.err
    lines: list[str] = []
    export_here(run, tmp_path / "other", warn=lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("name", ["mhc", "block_attnres", "pre_ln"])
def test_other_precisions(corpus: Corpus, tmp_path: Path, name: str, precision: str) -> None:
    """The checkpoint's type is kept; verification computes in float64, or float32 for bfloat16."""
    run = saved(run_of(corpus, tmp_path / "run", CASES[name], precision=precision), CASES[name].processes)
    said = export(run, tmp_path / "out")
    assert said.code == 0, said.err
    error = float(said.out.rpartition("agree to ")[2].split()[0])
    exact = precision == "fp64" and name != "pre_ln"  # Llama's norms are float32
    assert error < (1e-12 if exact else 1e-5)
    assert export(run, tmp_path / "half", "--dtype", "float16").code == 0
