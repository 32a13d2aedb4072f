"""What the command refuses before it loads a model, and what it takes for one."""

from pathlib import Path

import pytest

from depthbench import cli
from depthbench.errors import UserError
from depthbench.evaluation import command
from depthbench.evaluation.export import cap, read_config


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
