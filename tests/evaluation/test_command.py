"""What the command refuses before it loads a model, and what it takes for one."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthbench import cli
from depthbench.errors import UserError
from depthbench.evaluation import command
from depthbench.evaluation.export import cap, load, read_config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to evaluate: give --tasks"),
        (["--tasks", "a,,b"], "--tasks=a,,b: give each name once"),
        (["--tasks", "a,a"], "give each name once"),
        (["--domain-nll", "mbpp,mmlu"], "mmlu is none of mbpp, humaneval, sciq, gpqa_diamond, gsm8k, math500"),
        (["--domain-nll", "--limit", "0"], "--limit=0 must be at least 1"),
        (["--domain-nll", "--batch-size", "-2"], "--batch-size=-2 must be at least 1"),
        (["--domain-nll", "--include-path", "."], "--include-path needs --tasks"),
        (["--tasks", "a", "--data", "."], "--data needs --domain-nll"),
        (["--domain-nll", "--json", "nowhere/a.json"], "--json=nowhere/a.json: its folder does not exist"),
        (["--domain-nll", "--json", "FULL"], "is a folder; give a file in it"),
        (["--domain-nll", "--output", "FULL"], "is not an empty folder"),
        (["--domain-nll"], "absent does not exist"),
    ],
)
def test_refused(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "results.json").write_text("{}")
    words = [str(tmp_path / "full") if word == "FULL" else word for word in words]
    assert cli.main(["evaluate", str(tmp_path / "absent"), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_the_harness(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else name)
    assert cli.main(["evaluate", str(exports["pre_ln"]), "--tasks", "piqa"]) == 2
    assert 'lm_eval is not installed: pip install "depthbench[eval]"' in capsys.readouterr().err


def test_a_length_is_refused_before_data_is_fetched(
    exports: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--domain-nll", "--data", "nowhere", "--max-length", "513"]
    assert cli.main(["evaluate", str(exports["pre_ln"]), *words]) == 2
    assert "--max-length=513 is more than the model's 512 positions" in capsys.readouterr().err


def copied(source: Path, folder: Path, **settings: Any) -> Path:
    """A copy with other settings in its config.json."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


def test_folders_that_others_wrote(exports: dict[str, Path], tmp_path: Path) -> None:
    plain = copied(exports["pre_ln"], tmp_path / "plain")
    (plain / "README.md").write_bytes("# Größe\n\n| | |\n|---|---|\n| step | 7 |\n".encode("latin-1"))
    assert load(plain, "cpu", None, None).provenance.step == "7"
    wider = copied(exports["pre_ln"], tmp_path / "wider", intermediate_size=49)
    with pytest.raises(UserError, match=r"wider cannot be loaded"):
        load(wider, "cpu", None, None)


def test_results_come_before_what_else_cannot_be_written(tmp_path: Path) -> None:
    args = argparse.Namespace(json=str(tmp_path / "gone" / "results.json"), output=tmp_path / "out")
    with pytest.raises(OSError):
        command._write(args, {"model": {}}, {"mbpp": [{"nll": 1.0}]})
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == {"model": {}}
    assert json.loads((tmp_path / "out" / "samples_mbpp.jsonl").read_text()) == {"nll": 1.0}


def test_what_is_no_export(exports: dict[str, Path], tmp_path: Path) -> None:
    run = exports["pre_ln"].parent / "runs" / "pre_ln"
    (checkpoint,) = (run / "checkpoints").iterdir()
    for folder in (run, checkpoint):
        with pytest.raises(UserError) as refused:
            read_config(folder)
        assert f"export it first, depthbench convert export {folder} exports/{folder.name}" in str(refused.value)
    with pytest.raises(UserError, match=r"holds no Hugging Face model: it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="holds a JSON list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "someone/repository--modeling.Model"}}')
    with pytest.raises(UserError, match=r"someone/repository--modeling\.Model"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"auto_map": null}')
    with pytest.raises(UserError, match=r"auto_map=null is no object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)


def test_lengths() -> None:
    assert cap({"max_position_embeddings": 64}, None) == 64
    assert cap({"n_positions": 64}, 10) == 10
    assert cap({}, 10) == 10
    for config, wanted, message in (
        ({"n_ctx": 64}, 65, "--max-length=65 is more than the model's 64 positions"),
        ({}, 1, "--max-length=1 must be at least 2"),
        ({}, None, "give --max-length"),
    ):
        with pytest.raises(UserError, match=message):
            cap(config, wanted)
