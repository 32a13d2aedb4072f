"""The command's arguments, through the script."""

import os
import subprocess
import sys
from pathlib import Path

from depthbench.data.indexed import check_prefix
from depthbench.data.tokenizers import Tokenizer
from tests.data.helpers import read_back, write_jsonl, write_stream

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / "preprocess_data.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_prepare(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"], field="body")
    arguments = ("--input", path, "--output", tmp_path / "c", "--tokenizer", hf_tokenizer.path, "--workers", 1)
    done = run(*arguments, "--field", "body")
    assert done.returncode == 0, done.stderr
    assert "2 documents" in done.stdout
    assert "unigram entropy" in done.stdout
    assert read_back(tmp_path / "c", hf_tokenizer) == ["one", "two"]


def test_a_wrong_input_is_told_without_a_traceback(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    (tmp_path / "a.jsonl").write_text("oops\n")
    done = run("--input", tmp_path / "a.jsonl", "--output", tmp_path / "c", "--tokenizer", hf_tokenizer.path)
    assert done.returncode == 2
    assert "a.jsonl line 1: not JSON" in done.stderr
    assert "Traceback" not in done.stderr


def test_from_stream(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    stream = write_stream(tmp_path / "s.npy", [[5, 0], [6, 0]])
    arguments = ("--from-stream", "--input", stream, "--output", tmp_path / "c")
    assert "needs --tokenizer" in run(*arguments).stderr
    done = run(*arguments, "--tokenizer", hf_tokenizer.path)
    assert done.returncode == 0, done.stderr
    assert check_prefix(tmp_path / "c", 512, hf_tokenizer).documents == 2
