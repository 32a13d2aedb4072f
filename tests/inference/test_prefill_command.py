"""`depthbench prefill`: from a run, from a checkpoint and from a text, under layouts, and bad input."""

import json
import re
from pathlib import Path

import pytest

from depthbench import cli
from depthbench.errors import UserError
from depthbench.inference.load import find_source
from depthbench.model.recompute import Recompute
from depthbench.planning.cluster import CLUSTERS
from tests.corpora import Corpus

from .commands import LAYOUTS, checkpoint, command, processes_of

TINY = ["model.num_layers=4", "model.hidden_size=48", "model.ffn_hidden_size=64", "model.num_attention_heads=4"]
INTERLEAVED = LAYOUTS["pp2_vp2"]


@pytest.fixture(scope="module")
def folder(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(corpus, tmp_path_factory.mktemp("prefill") / "run", "hc")


def test_a_run(tmp_path: Path) -> None:
    out = tmp_path / "new" / "found.json"
    words = ["quickstart", "residual=full_attnres", *TINY, "--tokens", "33", "--chunk", "8", "--batch", "2"]
    said = command("prefill", *words, "--output", str(out))
    assert said.code == 0, said
    assert "full_attnres" not in said.err and "2 x 33 tokens in chunks of 8" in said.out
    found = json.loads(out.read_text())
    assert found["reading"] == {"tokens": 33, "chunk": 8, "batch": 2, "page": None, "most_ahead": None}
    (memory,), (plan,) = found["memory"]["ranks"], found["memory"]["planned_stages"]
    assert memory["kv_cache"] == plan["kv_cache"] and memory["depth_state"] == plan["depth_state"]
    assert found["tokens_per_second"] * found["seconds_to_first_token"] == pytest.approx(66)
    assert len(found["next_tokens"]) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_and_a_text(layout: str, folder: Path, tmp_path: Path) -> None:
    """Every layout finds the token that generating would write next."""
    text = tmp_path / "text.txt"
    text.write_text("The with statement wraps a block. " * 4)
    processes = processes_of(layout)
    out = tmp_path / "found.json"
    words = [str(folder), *LAYOUTS[layout], "--input", str(text), "--chunk", "7", "--json", "--output", str(out)]
    said = command("prefill", *words, processes=processes)
    assert said.code == 0, said.everyone
    found = json.loads(said.out)
    assert found == json.loads(out.read_text()) and len(found["memory"]["ranks"]) == processes
    written = command("generate", str(folder), "--file", str(text), "--max-tokens", "1", "--json")
    assert found["next_tokens"] == json.loads(written.out)["tokens"]


def test_a_dry_run(tmp_path: Path) -> None:
    """One process prints what eight would hold: 131072 tokens in chunks of 16384, 1.6B parameters."""
    words = ["depthbench_1600m", "residual=block_attnres", "parallel.tensor=8", "--tokens", "131072"]
    words += ["--chunk", "16384", "--dry-run", "--output", str(tmp_path / "none.json")]
    said = command("prefill", *words, "--cluster", "a100-40gb")
    assert said.code == 0 and "chunks of 16,384" in said.out and "depth state" in said.out, said
    assert not any(tmp_path.iterdir())
    small = tmp_path / "small.yaml"
    text = (CLUSTERS / "a100-40gb.yaml").read_text()
    small.write_text(re.sub(r"(?m)^memory_gib: .*", "memory_gib: 2.5", text))
    said = command("prefill", *words, "--cluster", str(small), "--json")
    found = json.loads(said.out)
    (plan,) = found["memory"]["planned_stages"]
    layers, tokens, width, own, element = 28, 131072, 2048, 16384 // 8, 2
    assert plan["kv_cache"] == 2 * layers * tokens * (8 * 128 // 8) * element
    assert plan["depth_state"] == (8 + 1) * own * width * element
    assert said.code == 1 and found["fits"] is False
    assert (
        f"needs {plan['peak'] / 2**30:.1f} GiB, each A100-SXM4-40GB" in said.err and "has 2.5: read smaller" in said.err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --tokens"),
        (["--tokens", "8", "--cluster", "h100"], "--cluster=h100 is for --dry-run"),
        (["--tokens", "8", "--cluster", "nowhere", "--dry-run"], "no 'nowhere' in launch/clusters"),
        (["--tokens", "0"], "--tokens=0 must be at least 1"),
        (["--tokens", "8", "--chunk", "0"], "a chunk of 0 tokens: give at least 1"),
        (["--tokens", "8", "--batch", "0"], "--batch=0 must be at least 1"),
        (["--tokens", "8", "--most-ahead", "0"], "--most-ahead=0 must be at least 1"),
        (["--tokens", "8", "residual=moda"], "trained with residual.architecture=hc"),
        (["--tokens", "8", "parallel.tensor=3"], "not divisible by parallel.tensor=3"),
        (["--tokens", "8", "pipeline.microbatch_group=-1"], "pipeline.microbatch_group=-1 must be above 0"),
        (["--tokens", "8", "pipeline.microbatch_group=2"], "microbatch_group=2 needs the interleaved schedule"),
        (["--tokens", "8", *INTERLEAVED, "pipeline.microbatch_group=4"], "groups of parallel.pipeline=2, as in larger"),
        (["--tokens", "8", "pipeline.timeout=0"], "pipeline.timeout=0.0 must be above 0"),
        (["--tokens", "8", "parallel.tensor=2"], "1 processes for parallel.tensor=2"),
        (["--input", "/nowhere.txt"], "cannot read /nowhere.txt"),
    ],
)
def test_bad_input(folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prefill", str(folder), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("output", [".", "file/found.json"])
def test_output_that_cannot_be_written(
    output: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found before the model is there."""
    (tmp_path / "file").touch()
    monkeypatch.setattr("depthbench.inference.load.load", None)
    assert cli.main(["prefill", str(folder), "--tokens", "8", "--output", f"{tmp_path}/{output}"]) == 2
    assert f"cannot write --output={tmp_path}" in capsys.readouterr().err


def test_texts_that_are_too_short(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    for content, tokens, message in (
        ("A short text.", ["--tokens", "5000"], "--tokens=5000: "),
        ("", ["--tokens", "5"], f"{text} has no tokens: "),
        ("", [], f"{text} has no tokens: "),
    ):
        text.write_text(content)
        assert cli.main(["prefill", str(folder), "--input", str(text), *tokens]) == 2
        assert (said := capsys.readouterr().err).startswith(f"depthbench: {message}") and "give a longer text" in said


def test_a_failure_leaves_no_empty_output(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise UserError("no such weight")

    monkeypatch.setattr("depthbench.inference.load.load", fails)
    former = tmp_path / "former.json"
    former.write_text("kept")
    for output in (former, tmp_path / "new.json"):
        assert cli.main(["prefill", str(folder), "--tokens", "8", "--output", str(output)]) == 2
        assert "no such weight" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [former] and former.read_text() == "kept"


def test_training_settings_do_not_change_reading() -> None:
    """Recomputation would end groups of depth reads."""
    run = find_source("quickstart", ["parallel.recompute=full", "parallel.distributed_optimizer=true"], 1).run
    assert run.parallel.recompute is Recompute.NONE and not run.parallel.distributed_optimizer


def test_there_is_no_such_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prefill", str(tmp_path), "--tokens", "8"]) == 2
    assert "is no complete checkpoint" in capsys.readouterr().err
    assert cli.main(["prefill", "nowhere", "--tokens", "8"]) == 2
    assert "no 'nowhere' in configs/runs" in capsys.readouterr().err
