"""Time and memory of `depthbench convert export`, verification included, of a large model with random weights.

    python benchmarks/convert/run.py --model 1600m_L28 --residual pre_ln block_attnres

Writes a bfloat16 checkpoint of configs/model/MODEL.yaml tensor by tensor, and exports it in a fresh process. Needs
twice the weights' size of disk. Memory is the peak of the resident set (VmHWM), which counts pages of mapped weight
files that have been touched, less what was resident when everything had been imported.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthbench.checkpoint.folder import MANIFEST, folder_name
from depthbench.checkpoint.streaming import Planned, write_tensors
from depthbench.config.load import group_file, plain, read_yaml, typed
from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.convert.names import exported_tensors

LIMIT = 2.5e9  # bytes beyond the interpreter


def settings(model: str, residual: str) -> RunConfig:
    groups = {name: read_yaml(group_file(name, choice)) for name, choice in (("model", model), ("residual", residual))}
    return typed(
        {
            "name": f"{model}_{residual}",
            **groups,
            "data": {"train": [{"prefix": "none"}], "tokenizer": "none"},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
        }
    )


def random_values(tensor: Planned) -> Tensor:
    """Gains near 1, all else near 0."""
    values = torch.randn(tensor.shape, dtype=torch.float32).mul_(0.02)
    return values.add_("norm" in tensor.key).to(tensor.dtype)


def write_checkpoint(folder: Path, run: RunConfig) -> int:
    """Returns the bytes of its weights."""
    exported = exported_tensors(run, residual_of(run), torch.bfloat16)
    tensors = {f"model.{each.logical}": each for each in exported}
    planned = {key: Planned(key, each.shape or (1,), each.dtype) for key, each in tensors.items()}
    torch.manual_seed(0)
    write_tensors(folder, planned.values(), lambda key: random_values(planned[key]))
    manifest = {"step": 1, "consumed_samples": 0, "architecture": run.architecture, "settings": plain(run)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return sum(each.bytes for each in exported)


def resident(field: str) -> int:
    """Bytes, by a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measured(action: Callable[[], Any], before: int) -> tuple[Any, float, int]:
    """What it returns, its seconds, and the peak of the resident set beyond `before`."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    start = time.monotonic()
    result = action()
    return result, time.monotonic() - start, resident("VmHWM") - before


def export_here(checkpoint: Path, out: Path) -> int:
    """In a process of its own: export and verify, and print what each took. Returns 1 where that is too much memory."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    from depthbench.convert.export import export
    from depthbench.convert.verify import verify

    before = resident("VmRSS")
    done, seconds, peak = measured(lambda: export(checkpoint, out, warn=lambda line: None), before)
    print(f"  export: {seconds:.0f} s, peak {peak / 1e9:.2f} GB beyond the interpreter's {before / 1e9:.2f}")
    found, seconds, other = measured(lambda: verify(done), before)
    print(f"  verification: {seconds:.0f} s, peak {other / 1e9:.2f} GB; {found.describe()}")
    assert found.equal
    peak = max(peak, other)
    print(f"  peak {peak / 1e9:.2f} GB: {'below' if peak < LIMIT else 'ABOVE'} the {LIMIT / 1e9:.1f} GB allowed")
    return int(peak >= LIMIT)


def main() -> int:
    """Returns 1 where an export takes more memory than allowed, or does not verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1600m_L28")
    parser.add_argument("--residual", nargs="+", default=["pre_ln", "block_attnres"])
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "depthbench-convert-benchmark")
    parser.add_argument("--child", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return export_here(*args.child)
    failed = False
    for residual in args.residual:
        shutil.rmtree(args.scratch, ignore_errors=True)
        checkpoint = args.scratch / folder_name(1)
        size = write_checkpoint(checkpoint, settings(args.model, residual))
        print(f"{args.model}, {residual}: {size / 1e9:.2f} GB of bfloat16 weights", flush=True)
        child = [sys.executable, __file__, "--child", str(checkpoint), str(args.scratch / "out")]
        failed |= subprocess.run(child).returncode != 0
        shutil.rmtree(args.scratch)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
