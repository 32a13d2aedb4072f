"""Interrupted and failing prepares: killed parents and workers, stale parts, bad data in the middle."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from depthbench.data.prepare import prepare
from depthbench.data.tokenizers import Tokenizer
from depthbench.errors import UserError
from tests.data.helpers import files_of, make_documents, write_jsonl

UNIT_BYTES = 4000
SCRIPT = """
import sys
from depthbench.data.prepare import prepare
from depthbench.errors import UserError
try:
    prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], workers=2, unit_bytes=int(sys.argv[4]))
except UserError as error:
    sys.exit(str(error))
"""


def start(corpus: Path, output: Path, tokenizer: Tokenizer) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(corpus), str(output), str(tokenizer.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([*command, str(UNIT_BYTES)], env=environment, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def finished_units(output: Path) -> int:
    return len(list(Path(f"{output}.parts").glob("*.json")))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", make_documents(12_000))


def test_a_killed_prepare_resumes_to_the_same_bytes(
    corpus: Path, tmp_path: Path, hf_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "killed"
    process = start(corpus, output, hf_tokenizer)
    wait_until(lambda: finished_units(output) > 0)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert workers
    wait_until(lambda: not any(map(is_running, workers)))
    done = finished_units(output)
    assert done > 0
    assert not Path(f"{output}.bin").exists()
    prepare([corpus], output, tokenizer=hf_tokenizer.path, workers=1, unit_bytes=UNIT_BYTES)
    assert f"resuming: {done} of" in capsys.readouterr().out
    prepare([corpus], tmp_path / "whole", tokenizer=hf_tokenizer.path, workers=2, unit_bytes=UNIT_BYTES)
    assert files_of(output) == files_of(tmp_path / "whole")
    assert not Path(f"{output}.parts").exists()


def test_a_killed_worker_is_reported_with_its_unit(corpus: Path, tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    output = tmp_path / "c"
    process = start(corpus, output, hf_tokenizer)
    wait_until(lambda: finished_units(output) > 0)
    # The first child is multiprocessing's resource tracker.
    victim = next(p for p in children(process.pid) if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes())
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "a worker died (exit code -9) on" in errors
    assert "a.jsonl (bytes" in errors
    assert "keeps the finished units" in errors
    assert finished_units(output) > 0


def test_stale_and_damaged_parts(tmp_path: Path, hf_tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", make_documents(200))
    bad = write_jsonl(tmp_path / "bad.jsonl", ["fine"] * 10)
    bad.write_text(bad.read_text() + "not json\n")

    def run(name: str) -> None:
        prepare([good, bad], tmp_path / name, tokenizer=hf_tokenizer.path, workers=1, unit_bytes=UNIT_BYTES)

    with pytest.raises(UserError, match=r"(?s)bad\.jsonl line 11: not JSON.*c\.parts keeps the finished units"):
        run("c")
    done = finished_units(tmp_path / "c")
    assert done > 2
    (tmp_path / "c.parts" / "000001.tokens").write_bytes(b"short")
    capsys.readouterr()
    with pytest.raises(UserError, match="line 11"):
        run("c")
    assert f"resuming: {done - 1} of" in capsys.readouterr().out
    write_jsonl(bad, ["fine"] * 11)
    run("c")
    assert "c.parts is from other inputs or settings: discarded" in capsys.readouterr().out
    run("fresh")
    assert files_of(tmp_path / "c") == files_of(tmp_path / "fresh")


def test_a_run_cut_off_between_two_splits_completes(tmp_path: Path, hf_tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_documents(100))
    blocked = tmp_path / "c_valid.idx.tmp"
    blocked.mkdir()  # the second split's index cannot be written

    def run() -> None:
        prepare([path], tmp_path / "c", tokenizer=hf_tokenizer.path, workers=1, valid_fraction=0.2)

    with pytest.raises(IsADirectoryError):
        run()
    assert (tmp_path / "c_train.json").exists()
    blocked.rmdir()
    run()
    assert (tmp_path / "c_valid.json").exists()
