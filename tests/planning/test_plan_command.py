"""`depthbench plan`: its two outputs, its errors, and that it never loads Megatron-Core."""

import argparse
import json
import subprocess
import sys

import pytest

from depthbench.config.load import load_run
from depthbench.errors import UserError
from depthbench.planning import flops
from depthbench.planning.command import add_arguments, run


def plan(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("depthbench_400m", "residual=hc", "train.steps=10", "--tokens", "4096", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    config = load_run("depthbench_400m", ["residual=hc"])
    assert shown == {
        "run": "depthbench_400m",
        "architecture": "hc",
        "parameters": {
            "total": 405_702_880,
            "backbone": 302_383_104,
            "embedding": 102_973_440,
            "residual": 346_336,
        },
        "flops": {
            "tokens": 4096,
            "prefill_paper": flops.prefill_paper(config, 4096),
            "forward_exact": flops.forward_exact(config, 4096),
            "train_per_token": flops.train_per_token(config),
        },
        "tokens": {"per_step": 2**20, "total": 10 * 2**20},
        "steps": 10,
        "edges": [],
    }


def test_tokens_default_to_the_models_sequence_length(capsys: pytest.CaptureFixture[str]) -> None:
    plan("depthbench_400m", "model.sequence_length=512", "--json")
    assert json.loads(capsys.readouterr().out)["flops"]["tokens"] == 512


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("depthbench_400m", "--tokens", "4096") == 0
    shown = capsys.readouterr().out
    for piece in ("depthbench_400m: pre_ln", "405,406,720", "3.302 TFLOPs", "1,048,576", "7,600", "7,969,177,600"):
        assert piece in shown


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_blocks=49 must lie in 1\.\.48"):
        plan("depthbench_400m", "residual=block_attnres", "residual.num_blocks=49")
    with pytest.raises(UserError, match="sequence of 0 tokens: give at least 1"):
        plan("depthbench_400m", "--tokens", "0")


def test_megatron_is_not_imported() -> None:
    code = """
import argparse, sys
from depthbench.planning.command import add_arguments, run
parser = argparse.ArgumentParser()
add_arguments(parser)
run(parser.parse_args(["depthbench_400m"]))
loaded = [name for name in sys.modules if name.startswith("megatron")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
