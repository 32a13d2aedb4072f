"""`depthbench plan`: its two outputs, its errors, and that it never loads Megatron-Core."""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from depthbench.config.load import load_run
from depthbench.errors import UserError
from depthbench.planning import flops, memory
from depthbench.planning.cluster import CLUSTERS
from depthbench.planning.command import add_arguments, run


def plan(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("depthbench_400m", "residual=hc", "train.steps=10", "--tokens", "4096", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    config = load_run("depthbench_400m", ["residual=hc"])
    ours = memory.memory(config, 1)
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
        "kv_cache_bytes": 384 * 2**20,
        "tokens": {"per_step": 2**20, "total": 10 * 2**20},
        "steps": 10,
        "world_size": 1,
        "edges": [],
        "memory": {
            "peak": ours[0].peak,
            "stages": [{**vars(ours[0]), "peak": ours[0].peak}],
            "assumptions": memory.assumptions(config),
        },
        "cache_bytes": [0],
        "bubble": 0.0,
        "data_parallel_bytes": [0],
        "step_seconds": None,
        "device": None,
        "fits": True,
        "time": None,
    }


PIPELINE = ["residual=full_attnres", "parallel.pipeline=4", "parallel.virtual_pipeline=2", "parallel.tensor=2"]


def test_json_of_a_pipeline_on_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    """Each chunk's edges forward and backward, a rank of each stage, what replicas exchange, and times."""
    words = ["depthbench_400m", *PIPELINE, "train.micro_batch=4", "--cluster", "h100", "--gpus", "16", "--json"]
    assert plan(*words) == 0
    shown = json.loads(capsys.readouterr().out)
    edges = shown["edges"]
    assert [(edge["from"], edge["to"]) for edge in edges] == [
        *((chunk, chunk + 1) for chunk in range(7)),
        *((chunk + 1, chunk) for chunk in reversed(range(7))),
    ]
    token = 4 * 1024 * 2  # bytes of a microbatch's token position in bf16, four sequences
    # by the paper's scheme a stage's second chunk gets what was not there before the first one ran, its own sources
    # among it; there was the embedding alone before chunk 0
    paper = {1: 7, 2: 13, 3: 19, 4: 25 - 1, 5: 31 - 7, 6: 37 - 13, 7: 43 - 19}
    for edge in edges:
        # a chunk leaves 6 sources (three layers of two sublayers); stages 4.. have those of the chunk before
        receiver = max(edge["from"], edge["to"])
        known = 6 * (receiver - 3) + 1 if receiver >= 4 else 0
        per_source = shown["flops"]["tokens"] * token
        assert edge["live_tensors"] == 0 and edge["history_tensors"] == 6 * receiver + 1 - known
        assert edge["bytes_without_cache"] == (6 * receiver + 1) * per_source
        assert edge["bytes"] == edge["history_tensors"] * per_source
        assert edge["bytes_paper"] == paper[receiver] * 16_777_216
    assert [stage["stage"] for stage in shown["memory"]["stages"]] == [0, 1, 2, 3] and len(shown["cache_bytes"]) == 4
    # 50,280 rows, padded to 50,432 for two ranks; 4 x 2,048 tokens
    assert [stage["logits"] for stage in shown["memory"]["stages"]] == [0, 0, 0, 8192 * 25_216 * 2]
    assert [stage["history_cache"] for stage in shown["memory"]["stages"]] == shown["cache_bytes"]
    assert shown["memory"]["peak"] == max(stage["peak"] for stage in shown["memory"]["stages"])
    assert shown["world_size"] == 16 and all(size > 0 for size in shown["data_parallel_bytes"])
    assert 0 < shown["bubble"] < 1 and shown["bubble"] == shown["time"]["bubble"]
    assert shown["step_seconds"] == shown["time"]["step"] > 0 and shown["fits"]


def test_json_of_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    """Of four, each sends three quarters of every weight's bytes twice in rings: its gradient in float32, and then the
    updated weight in bf16, or without the distributed optimizer the gradient again. The vocabulary's 50,280 rows are
    padded to 50,304, in two tables."""
    weights = 405_406_720 + 2 * 24 * 1024
    for sharded, sent in (("true", weights * 6 * 3 // 4), ("false", weights * 8 * 3 // 4)):
        words = ["train.micro_batch=4", f"parallel.distributed_optimizer={sharded}"]
        words += ["parallel.overlap_param_gather=false", "--gpus", "4", "--json"]
        assert plan("depthbench_400m", *words) == 0
        assert json.loads(capsys.readouterr().out)["data_parallel_bytes"] == [sent]


# tokens of the paper's figure: bf16, keys and values of all layers
@pytest.mark.parametrize(
    ("layers", "mebibytes"), [(16, 304), (20, 350), (24, 384), (28, 420), (32, 448), (42, 525), (70, 700)]
)
def test_key_value_cache_is_the_papers(layers: int, mebibytes: int) -> None:
    """For one sequence of 4096 tokens, of any architecture."""
    for residual in ("pre_ln", "moda", "full_attnres"):
        run = load_run("depthbench_400m", [f"model=400m_L{layers}", f"residual={residual}"])
        assert memory.kv_cache_bytes(run, 4096) == mebibytes * 2**20


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


def test_a_cluster_adds_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["depthbench_400m", "train.micro_batch=8", "--cluster", "a100-40gb", "--gpus", "64"]
    assert plan(*words) == 0
    shown = capsys.readouterr().out
    for piece in ("a step on 64 A100-SXM4-40GB, predicted", "MFU", "GPU-hours, the whole run", "GiB on a rank of 64"):
        assert piece in shown
    assert plan(*words, "--json") == 0
    time = json.loads(capsys.readouterr().out)["time"]
    for said in (f"{time['step']:.4g} s", f"{time['mfu']:.1%}", f"{time['gpu_hours']:,.0f}"):
        assert said in shown


def test_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1; what is needed, what there is and the way out on stderr, and the plan all the same."""
    words = ["depthbench_400m", "model=400m_L70", "train.micro_batch=64", "--cluster", "a100-40gb", "--gpus", "8"]
    assert plan(*words) == 1
    shown = capsys.readouterr()
    run = load_run("depthbench_400m", ["model=400m_L70", "train.micro_batch=64"])
    needed = max(rank.peak for rank in memory.memory(run, 8)) / 2**30
    assert f"needs {needed:.1f} GiB, each A100-SXM4-40GB has 38:" in shown.err
    assert "train.micro_batch=64" in shown.err and "parallel.recompute=full" in shown.err and "MFU" in shown.out
    assert plan(*words, "--json") == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["parallel.tensor=2", "--gpus", "7"],
            r"7 processes cannot hold parallel\.tensor=2 .* = 2 ranks .* multiple of 2",
        ),
        (["train.micro_batch=16", "--gpus", "64"], r"train\.global_batch=512 is not a multiple of .* = 1024"),
        (["--gpus", "8,16"], r"--gpus=8,16: several numbers need --search"),
        (["--gpus", "eight"], r"--gpus=eight: give a number, or several with commas between"),
        (["--gpus", "0"], r"--gpus=0"),
        (["--gpus", "-8"], r"--gpus=-8"),
        (["--search"], r"--search needs --cluster NAME"),
    ],
)
def test_processes_that_cannot_be(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan("depthbench_400m", *words)


def test_search(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table whose numbers are whole in a pipe too, which has 80 columns, and for each number of GPUs a line that can
    be pasted and plans the fastest layout."""
    monkeypatch.setenv("COLUMNS", "80")
    cluster = str(shutil.copy(CLUSTERS / "a100-40gb.yaml", tmp_path / "our own.yaml"))
    words = ["depthbench_400m", "residual=block_attnres", "--cluster", cluster, "--gpus", "8,16", "--search"]
    assert plan(*words) == 0
    shown = capsys.readouterr().out
    assert "depthbench_400m: fastest layouts on A100-SXM4-40GB" in shown and "…" not in shown
    assert plan(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    rows = iter([row for row in shown.splitlines() if row.startswith("│")])
    for choice, row in zip(found["choices"], rows, strict=True):
        time = choice["time"]
        numbers = [f"{choice['memory'] / 2**30:.1f}", f"{time['step']:.3f}", f"{time['bubble']:.1%}"]
        numbers += [f"{time['mfu']:.1%}", f"{time['tokens_per_second']:,.0f}", f"{time['gpu_hours']:,.0f}"]
        cells = [cell.strip() for cell in row.split("│")[1:-1]]
        assert cells[0] == str(choice["gpus"]) and cells[7:] == numbers
    for gpus in ("8", "16"):
        begin = f"{gpus} GPUs: depthbench "
        command = shown[shown.index(begin) + len(begin) :].replace("\\\n", " ").splitlines()[0]
        words = shlex.split(command)
        assert words[0] == "plan" and "residual=block_attnres" in words
        assert plan(*words[1:], "--json") == 0
        best = json.loads(capsys.readouterr().out)
        listed = next(choice for choice in found["choices"] if choice["gpus"] == int(gpus))
        assert best["world_size"] == int(gpus) and best["fits"]
        assert best["step_seconds"] == listed["time"]["step"]


def test_a_deep_pipeline_on_a_narrow_console(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage's numbers are whole."""
    monkeypatch.setenv("COLUMNS", "80")
    words = ["parallel.pipeline=12", "train.micro_batch=1"]
    assert plan("depthbench_400m", *words) == 0
    shown = capsys.readouterr().out
    (row,) = [row for row in shown.splitlines() if row.startswith("│ peak ")]
    stages = memory.memory(load_run("depthbench_400m", words), 12)
    assert row.split("│")[2:-1] == [f" {stage.peak / 2**30:.3f} " for stage in stages] and "…" not in shown


@pytest.mark.parametrize("words", ["", "--cluster h100 --gpus 8 --search"])
def test_megatron_is_not_imported(words: str) -> None:
    code = f"""
import argparse, sys
from depthbench.planning.command import add_arguments, run
parser = argparse.ArgumentParser()
add_arguments(parser)
run(parser.parse_args(["depthbench_400m", "train.micro_batch=2", *"{words}".split()]))
loaded = [name for name in sys.modules if name.startswith("megatron")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


PLAN = """plan depthbench_1600m model=1600m_L40 residual=block_attnres train.micro_batch=1
    --cluster a100-40gb --gpus 64 --json"""
AT_EXIT = f"""
import atexit, json, runpy, sys, time

def report():
    import torch.distributed as dist
    megatron = [name for name in sys.modules if name.startswith("megatron")]
    print(json.dumps([megatron, dist.is_initialized(), time.process_time()]), file=sys.stderr)

atexit.register(report)
sys.argv[1:] = {PLAN.split()}
runpy.run_module("depthbench", run_name="__main__", alter_sys=True)
"""


def test_a_plan_for_64_gpus_takes_seconds() -> None:
    """The command itself, twice: no Megatron-Core, no process group; the second time, warm, within 5 s where importing
    torch takes 2 s. In seconds of the processor, and by what importing torch takes, so for any machine."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", AT_EXIT], check=True, capture_output=True, text=True)
        assert json.loads(done.stdout)["world_size"] == 64
        megatron, started, seconds = json.loads(done.stderr)
        assert not megatron and not started
    imports = "import time, torch; print(time.process_time())"
    yardstick = float(subprocess.run([sys.executable, "-c", imports], check=True, capture_output=True).stdout)
    print(f"{seconds:.1f} s, of which importing torch {yardstick:.1f} s")
    assert seconds < 2.5 * yardstick
