"""The command's arguments, and the script around it."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from depthbench.data.indexed import check_prefix
from depthbench.data.prepare import add_arguments, run
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError
from tests.data.helpers import read_back, write_jsonl, write_stream

ROOT = Path(__file__).parents[2]


def command(line: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(line.split()))


def test_prepare(tmp_path: Path, hf_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"], field="body")
    line = f"--input {path} --output {tmp_path}/c --tokenizer {hf_tokenizer.path} --workers 1 --field body"
    assert command(line) == 0
    out = capsys.readouterr().out
    assert "2 documents" in out
    assert "unigram entropy" in out
    assert read_back(tmp_path / "c", hf_tokenizer) == ["one", "two"]


def test_from_stream(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    stream = write_stream(tmp_path / "s.npy", [[5, 0], [6, 0]])
    line = f"--from-stream --input {stream} --output {tmp_path}/c"
    with pytest.raises(UserError, match="needs --tokenizer"):
        command(line)
    line += f" --tokenizer {hf_tokenizer.path}"
    with pytest.raises(UserError, match="leave out --train-tokenizer, --valid-fraction"):
        command(f"{line} --valid-fraction 0.1")
    assert command(line) == 0
    assert check_prefix(tmp_path / "c", 512, hf_tokenizer).documents == 2


def test_the_script_tells_a_wrong_input_without_a_traceback(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("oops\n")
    script = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "preprocess_data.py")]
    arguments = ["--input", f"{tmp_path}/a.jsonl", "--output", f"{tmp_path}/c", "--tokenizer", str(hf_tokenizer.path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*script, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "a.jsonl line 1: not JSON" in done.stderr
    assert "Traceback" not in done.stderr
