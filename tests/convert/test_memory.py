"""An export holds a shard, its verification a part of either model, never a whole one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from depthbench.convert.export import export
from depthbench.convert.memory import give_back
from depthbench.convert.verify import verify
from tests.corpora import Corpus
from tests.harness import run_workers

from .checkpoints import CASES, Case, run_of, saved

MB = 10**6
WIDE = {"num_layers": 8, "hidden_size": 768, "ffn_hidden_size": 2304, "num_attention_heads": 12, "num_kv_heads": 12}
SHARD = 50 * MB


def resident(field: str) -> int:
    """Bytes of this process, by a field of its status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def rise(action: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how far resident memory rose meanwhile."""
    give_back()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    return action(), resident("VmHWM") - before


def both(rank: int, world_size: int, store: str, run: Path, out: Path) -> tuple[int, int, int]:
    """Bytes of the weights, and the rise during the export and during its verification."""
    done, exporting = rise(lambda: export(run, out, max_shard_bytes=SHARD, warn=print))
    found, verifying = rise(lambda: verify(done))
    assert found.equal
    return sum(tensor.bytes for tensor in done.tensors), exporting, verifying


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak")
@pytest.mark.parametrize("name", ["pre_ln", "block_attnres"])
def test_memory(corpus: Corpus, tmp_path: Path, name: str) -> None:
    """Of a model of 245 MB, whose blocks have 31; libraries that are imported meanwhile count as well."""
    run = saved(run_of(corpus, tmp_path / "run", Case(CASES[name].residual, WIDE, {})))
    ((weights, exporting, verifying),) = run_workers(1, both, run, tmp_path / "out")
    print(f"{weights / MB:.0f} MB of weights; exporting took {exporting / MB:.0f}, verifying {verifying / MB:.0f}")
    assert weights > 240 * MB
    assert exporting < 3 * SHARD
    assert verifying < 3 * SHARD
