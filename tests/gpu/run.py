"""One prepared script for a machine with NVIDIA GPUs, under five minutes on one H200: checks, then 20 steps of each
architecture at 400m_L24 on random tokens, then one table.

    bash tests/gpu/run.sh [--plan] [--output FOLDER] [--cpu-rehearsal]
    bash tests/gpu/pipeline.sh [the same]
    bash tests/gpu/prefill.sh [the same]

The second runs the checks of pipelines, on two GPUs and on four; the third reads long texts on one. --plan prints what
would run. --cpu-rehearsal runs the same with tiny sizes on a CPU. Without a GPU it says so and exits 0; else it exits 1
if anything failed. Results: benchmarks/results/<gpu-name>.{md,json}, of the others <gpu-name>-{pipeline,prefill}.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthbench.checkpoint.folder import latest
from depthbench.config.load import load_run
from depthbench.paths import CONFIGS
from depthbench.planning.memory import peak_memory
from depthbench.profiling.events import Kind, load_recording
from depthbench.residual import Residual
from tests.checkpoint.reading import differing, read_checkpoint

from . import prefill
from .data import write_data

ROOT = Path(__file__).parents[2]
SECONDS = 285
ARCHITECTURES = sorted(path.stem for path in (CONFIGS / "residual").glob("*.yaml") if path.stem in Residual.registry)


@dataclass(frozen=True)
class Scale:
    """words: settings over those of the run; micro_batch: None takes the recipe's."""

    vocab: int
    steps: int
    global_batch: int
    sequence: int
    micro_batch: int | None
    words: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return (self.steps + 1) * self.global_batch * (self.sequence + 1)


FULL = Scale(50280, steps=20, global_batch=32, sequence=2048, micro_batch=None, words=())
TINY_MODEL = ("num_layers=4", "hidden_size=64", "ffn_hidden_size=96", "num_attention_heads=2")
TINY = Scale(
    512, steps=4, global_batch=4, sequence=64, micro_batch=2, words=tuple(f"model.{word}" for word in TINY_MODEL)
)


@dataclass
class Row:
    """One architecture's short run; None where it is not known."""

    architecture: str
    micro_batch: int = 0
    tokens_per_second: float | None = None
    mfu: float | None = None
    peak_memory_gib: float | None = None
    planned_memory_gib: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    error: str = ""


@dataclass
class Report:
    device: str
    gpus: int
    torch: str
    seconds: float = 0.0
    checks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check["passed"] for check in self.checks) and not any(row.error for row in self.rows)


# -- commands ---------------------------------------------------------------------------------------------------------
def checks_command(name: str, processes: int) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launcher if processes > 1 else []), "-m", "tests.gpu.checks", name]


def train_words(scale: Scale, folder: Path, run: str, *words: str) -> list[str]:
    """Settings of a run on the random data, under `folder`; `words` come last."""
    return [
        *("model=400m_L24", f"model.vocab_size={scale.vocab}", f"model.sequence_length={scale.sequence}"),
        *scale.words,
        *(f"data.train=[{{prefix: {folder}/random}}]", "data.valid=[]", f"data.tokenizer={folder}/tokenizer.json"),
        *("data.workers=1", "train.eval_every=0", "checkpoint.every=0", "log.tensorboard=false"),
        *(f"train.steps={scale.steps}", f"train.global_batch={scale.global_batch}", f"run_dir={folder}/{run}"),
        *words,
    ]


def short_run_words(scale: Scale, folder: Path, architecture: str, micro_batch: int | None = None) -> list[str]:
    """20 steps of the 400M recipe."""
    size = micro_batch or scale.micro_batch
    words = [f"residual={architecture}", *([f"train.micro_batch={size}"] if size else [])]
    return train_words(scale, folder, architecture, *words)


# attention's backward adds in one order at 64 tokens: longer ones are not bit-equal twice on CUDA
RESUME = TINY
_RESUMED = ("residual=block_attnres", "parallel.distributed_optimizer=true", "train.steps=6", "train.micro_batch=2")


def resume_words(folder: Path) -> list[list[str]]:
    """Six steps at once; three, saved while training goes on, and three more."""
    whole = train_words(RESUME, folder, "whole", *_RESUMED)
    broken = train_words(RESUME, folder, "broken", *_RESUMED, "checkpoint.mode=async", "checkpoint.every=2")
    return [whole, [*broken, "train.stop_at=3"], broken]


def profile_command(folder: Path) -> list[str]:
    words = train_words(TINY, folder, "profiled", "residual=block_attnres", "train.micro_batch=2")
    return [sys.executable, "-m", "depthbench", "profile", "depthbench_400m", *words, "--steps", "2"]


def train_command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "depthbench", "train", "depthbench_400m", *words]


def plan(scale: Scale, folder: Path, processes: int) -> list[tuple[str, list[str]]]:
    """Everything that runs, in order: what it is and its command."""
    steps = [("checks of one process", checks_command("single", 1))]
    if processes > 1:
        steps.append(("checks of two processes", checks_command("layouts", 2)))
    steps += [("resume", train_command(words)) for words in resume_words(folder / "resume")]
    steps.append(("profile", profile_command(folder / "resume")))
    steps += [(f"run of {name}", train_command(short_run_words(scale, folder, name))) for name in ARCHITECTURES]
    return steps


def pipeline_sizes(gpus: int) -> list[int]:
    """Numbers of processes that the pipelines are checked with; NCCL refuses two on one GPU."""
    return [processes for processes in (2, 4) if processes <= gpus]


# -- running them -----------------------------------------------------------------------------------------------------
class Runner:
    """Runs commands until the time is up; their output goes to a file, and its end to the console if they fail."""

    def __init__(self, folder: Path, seconds: float, rehearsal: bool) -> None:
        self.log, self.deadline = folder / "log.txt", time.monotonic() + seconds
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        self.environment = {**os.environ, **own, "OMP_NUM_THREADS": "1" if rehearsal else "4"}

    def __call__(self, what: str, command: Sequence[str], at_most: float = 150.0) -> tuple[int, str]:
        """Exit status (124: out of time) and output."""
        limit = min(at_most, self.deadline - time.monotonic())
        if limit < 5:
            print(f"{what}: no time left", flush=True)
            return 124, "no time left"
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment, cwd=ROOT, timeout=limit
            )
            status, output = done.returncode, done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            status, output = 124, (error.stdout or b"").decode(errors="replace") + f"\nstopped after {limit:.0f} s"
        with open(self.log, "a") as log:
            log.write(f"$ {' '.join(command)}\n{output}\n")
        print(f"{what}: exit {status} after {time.monotonic() - began:.0f} s", flush=True)
        if status:
            print("\n".join("    " + line for line in output.splitlines()[-15:]), flush=True)
        return status, output


def run_checks(runner: Runner, name: str, processes: int) -> list[dict[str, Any]]:
    status, output = runner(f"checks {name} in {processes} processes", checks_command(name, processes), at_most=240)
    found = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("CHECK {")]
    if status and all(check["passed"] for check in found):
        found.append(failed(f"{name}/process", f"exit {status}"))
    return found


def failed(name: str, detail: str) -> dict[str, Any]:
    return {"name": name, "passed": False, "seconds": 0.0, "detail": detail}


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_resume(runner: Runner, folder: Path) -> dict[str, Any]:
    """Losses, norms and every tensor of the last checkpoint of a run that was stopped equal those of one that was not,
    bit by bit."""
    began = time.monotonic()
    write_data(folder, RESUME.vocab, RESUME.tokens * 2)
    for words in resume_words(folder):
        status, _ = runner("resume", train_command(words), 90)
        if status:
            return failed("resume/async", f"exit {status}")
    whole, broken = ([(m["loss"], m["grad_norm"]) for m in lines_of(folder / run)] for run in ("whole", "broken"))
    one, other = (latest(folder / run / "checkpoints") for run in ("whole", "broken"))
    assert one and other
    wrong = differing(read_checkpoint(one.path), read_checkpoint(other.path))
    detail = "" if whole == broken else f"losses and norms {whole} and {broken}"
    detail = detail or (f"{len(wrong)} tensors differ, first {wrong[0]}" if wrong else "")
    seconds = round(time.monotonic() - began, 2)
    return {"name": "resume/async", "passed": not detail, "seconds": seconds, "detail": detail}


def check_profile(runner: Runner, folder: Path) -> dict[str, Any]:
    """A recording by the device's own clock: spans that end after they begin, within their steps, and a report."""
    began = time.monotonic()
    status, _ = runner("profile", profile_command(folder), 90)
    if status:
        return failed("profile/one process", f"exit {status}")
    (record,) = load_recording(folder / "profiled/profile").ranks
    steps = {span.step: span for span in record.spans if span.kind is Kind.STEP}
    passes = [span for span in record.spans if span.kind in (Kind.FORWARD, Kind.BACKWARD)]
    inside = all(steps[s.step].begin <= s.begin <= s.end <= steps[s.step].end for s in passes)
    whole = len(steps) == 2 and len(passes) == 2 * 2 * TINY.global_batch // 2
    detail = "" if inside and whole and record.memory_bytes else f"{len(steps)} steps, {len(passes)} passes, {inside=}"
    seconds = round(time.monotonic() - began, 2)
    return {"name": "profile/one process", "passed": not detail, "seconds": seconds, "detail": detail}


def check_memory(row: Row) -> dict[str, Any]:
    """The plan's memory within 10 % of the allocator's peak."""
    planned, measured = row.planned_memory_gib or 0.0, row.peak_memory_gib or 0.0
    passed = 0.9 * measured <= planned <= 1.1 * measured
    detail = "" if passed else f"planned {planned:.2f} GiB, measured {measured:.2f}"
    return {"name": f"memory/{row.architecture}", "passed": passed, "seconds": 0.0, "detail": detail}


def short_run(runner: Runner, scale: Scale, folder: Path, architecture: str) -> Row:
    """Halves the micro batch until it fits."""
    size = load_run("depthbench_400m", short_run_words(scale, folder, architecture)).train.micro_batch
    row = Row(architecture)
    while True:
        shutil.rmtree(folder / architecture, ignore_errors=True)
        words = short_run_words(scale, folder, architecture, size)
        status, output = runner(f"run of {architecture} with micro batch {size}", train_command(words))
        if status == 0 or size == 1 or "out of memory" not in output.lower():
            break
        size //= 2
    row.micro_batch = size
    if status:
        row.error = f"exit {status}"
        return row
    lines = lines_of(folder / architecture)
    settled = lines[len(lines) // 2 :]
    row.tokens_per_second = statistics.median(line["tokens_per_second"] for line in settled)
    if all("mfu" in line for line in settled):
        row.mfu = statistics.median(line["mfu"] for line in settled)
    row.peak_memory_gib = max(line["memory_gib"] for line in lines)
    row.planned_memory_gib = peak_memory(load_run("depthbench_400m", words), 1) / 2**30
    row.first_loss, row.last_loss = lines[0]["loss"], lines[-1]["loss"]
    shutil.rmtree(folder / architecture)  # some gigabytes of checkpoint
    return row


# -- the report -------------------------------------------------------------------------------------------------------
def markdown(report: Report) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"# {report.device}",
        "",
        f"{report.gpus} GPUs, torch {report.torch}, {report.seconds:.0f} s in all. 400m_L24 in bfloat16, sequences of "
        f"{FULL.sequence}, {FULL.global_batch} a step, {FULL.steps} steps on random tokens, one GPU; speed and MFU are "
        "medians of the second half."
        if report.gpus
        else f"A rehearsal on a CPU with tiny sizes, {report.seconds:.0f} s in all: no measurement.",
        "",
        "| architecture | micro batch | tokens/s | MFU | peak, GiB | planned | first loss | last loss | passed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report.rows:
        own = [check for check in report.checks if check["name"].endswith(f"/{row.architecture}")]
        cells = [row.architecture, str(row.micro_batch), shown(row.tokens_per_second, ",.0f"), shown(row.mfu, ".1%")]
        cells += [shown(row.peak_memory_gib, ".1f"), shown(row.planned_memory_gib, ".1f")]
        cells += [shown(row.first_loss, ".3f"), shown(row.last_loss, ".3f")]
        cells += [f"{sum(check['passed'] for check in own)} of {len(own)}" + (f", {row.error}" if row.error else "")]
        lines.append(f"| {' | '.join(cells)} |")
    good = sum(check["passed"] for check in report.checks)
    lines += ["", f"{good} of {len(report.checks)} checks passed."]
    lines += [f"- failed: {check['name']}: {check['detail']}" for check in report.checks if not check["passed"]]
    return "\n".join(lines) + "\n"


def write_report(report: Report, folder: Path, suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", report.device).strip("-") + suffix
    (folder / f"{name}.md").write_text(markdown(report))
    (folder / f"{name}.json").write_text(json.dumps({**asdict(report), "passed": report.passed}, indent=1) + "\n")


def perform(scale: Scale, scratch: Path, output: Path, gpus: int) -> int:
    """Run everything; what was found is written after each part, so that a script that is stopped leaves its part."""
    began = time.monotonic()
    rehearsal = not gpus
    runner = Runner(scratch, 900 if rehearsal else SECONDS, rehearsal)
    device = "cpu-rehearsal" if rehearsal else torch.cuda.get_device_name()
    report = Report(device, gpus, torch.__version__)
    report.checks += run_checks(runner, "single", 1)
    if rehearsal or gpus > 1:
        report.checks += run_checks(runner, "layouts", 2)
    (scratch / "resume").mkdir()
    report.checks.append(check_resume(runner, scratch / "resume"))
    report.checks.append(check_profile(runner, scratch / "resume"))
    write_data(scratch, scale.vocab, scale.tokens)
    for architecture in ARCHITECTURES:
        report.rows.append(short_run(runner, scale, scratch, architecture))
        if gpus and not report.rows[-1].error:  # of a CPU's process there is no allocator to ask
            report.checks.append(check_memory(report.rows[-1]))
        report.seconds = time.monotonic() - began
        write_report(report, output)
    print(f"\n{markdown(report)}\nwritten to {output}")
    return 0 if report.passed else 1


def perform_pipelines(scratch: Path, output: Path, gpus: int) -> int:
    began = time.monotonic()
    rehearsal = not gpus
    runner = Runner(scratch, 900 if rehearsal else SECONDS, rehearsal)
    report = Report("cpu-rehearsal" if rehearsal else torch.cuda.get_device_name(), gpus, torch.__version__)
    for processes in pipeline_sizes(gpus or 4):
        report.checks += run_checks(runner, "pipelines", processes)
    report.seconds = time.monotonic() - began
    write_report(report, output, "-pipeline")
    for check in report.checks:
        print(f"{'passed' if check['passed'] else 'FAILED'} {check['name']} {check['detail']}")
    return 0 if report.passed else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--cpu-rehearsal", action="store_true")
    parser.add_argument("--pipeline", action="store_true", help="the checks of pipelines instead")
    parser.add_argument("--prefill", action="store_true", help="reading of long texts instead")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results; for a rehearsal, a scratch folder")
    args = parser.parse_args(arguments)
    gpus = 0 if args.cpu_rehearsal else torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not args.cpu_rehearsal and not args.plan:
        print("tests/gpu: no NVIDIA GPU is seen here, so nothing was run; --cpu-rehearsal runs it with tiny sizes")
        return 0
    if args.pipeline and gpus == 1:
        print("tests/gpu: NCCL takes one process a GPU and here is one GPU, so no pipeline was run")
        return 0
    scale = TINY if args.cpu_rehearsal else FULL
    if args.plan and args.prefill:
        print("\n".join(map(str, prefill.parts(prefill.REHEARSED if args.cpu_rehearsal else 1))))
        return 0
    if args.plan and args.pipeline:
        for processes in pipeline_sizes(gpus or 4):
            print(f"pipelines of {processes}: {' '.join(checks_command('pipelines', processes)[1:])}")
        return 0
    if args.plan:
        for what, command in plan(scale, Path("SCRATCH"), 2 if args.cpu_rehearsal else gpus):
            print(f"{what}: {' '.join(command[1:])}")
        return 0
    with tempfile.TemporaryDirectory(prefix="depthbench-gpu-") as scratch:
        results = ROOT / "benchmarks" / "results" if gpus else Path(scratch) / "results"
        if args.pipeline:
            return perform_pipelines(Path(scratch), args.output or results, gpus)
        if args.prefill:
            return prefill.perform(args.output or results, rehearsal=not gpus)
        return perform(scale, Path(scratch), args.output or results, gpus)


if __name__ == "__main__":
    sys.exit(main())
