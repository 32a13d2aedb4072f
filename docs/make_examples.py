"""Records the examples of docs/profile.md: four stages of two chunks with the history cache, and the same without it.

python docs/make_examples.py [OLD]    # minutes on two CPU cores; writes docs/examples/ and the page's tables

Each is recorded several times, in turn, and the one whose longest step is the shortest is taken: other work on the
machine disturbed that one least. Needs the quickstart's data (launch/quickstart.sh) and a Chromium, for the picture of
a report. OLD: a folder with both recordings, to make the files anew from; where it has none, they are left there.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from depthbench.profiling.analysis import summarize
from depthbench.profiling.compare import compare, comparison_table
from depthbench.profiling.compare_page import write_comparison
from depthbench.profiling.events import Recording, load_recording
from depthbench.profiling.render import summary_table
from depthbench.profiling.report import write_report
from depthbench.profiling.timeline import draw_timeline

if TYPE_CHECKING:
    from docs.browser import CHROMIUM, FLAGS, MISSING
    from docs.make_reference import replaced
else:  # as a script, this folder is on the path
    from browser import CHROMIUM, FLAGS, MISSING
    from make_reference import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_name("profile.md")
EXAMPLES = Path(__file__).with_name("examples")
RUNS = {"with_cache": "true", "without_cache": "false"}
WORDS = ["quickstart", "parallel=pp4_vp2", "model.num_layers=8", "train.micro_batch=2"]
TIMES = ["--warmup", "5", "--steps", "2"]
ATTEMPTS = 4
WIDTH, HEIGHT, MARGIN = 1300, 2600, 24
_SECTION = re.compile(r"<section>.*?</section>", re.DOTALL)


def record(folder: Path) -> None:
    """Both runs, in `folder`, so that paths in reports are those of a run in a checkout."""
    (folder / "runs").mkdir(parents=True)
    (folder / "runs" / "data").symlink_to(ROOT / "runs" / "data")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    best: dict[str, float] = {}
    for name, cache in [*RUNS.items()] * ATTEMPTS:
        words = [*WORDS, f"pipeline.history_cache={cache}", f"run_dir=runs/{name}"]
        subprocess.run(
            [*launcher, "-m", "depthbench", "profile", *words, *TIMES],
            check=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.DEVNULL,
        )
        summary = summarize(load_recording(folder / "runs" / name / "profile"))
        step = max(step.length for step in summary.steps)
        print(f"{name}: {step / 1e6:.3f} s")
        kept = folder / "runs" / f"{name}.best"
        if step < best.get(name, float("inf")):
            best[name] = step
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder / "runs" / name, kept)
    for name in RUNS:
        shutil.rmtree(folder / "runs" / name)
        (folder / "runs" / f"{name}.best").rename(folder / "runs" / name)


def load(folder: Path, name: str) -> Recording:
    """A recording as if made in a checkout, on a host of no special name."""
    inside = Path("runs") / name / "profile"
    recording = load_recording(folder / inside)
    ranks = [replace(rank, host="localhost") for rank in recording.ranks]
    return replace(recording, folder=inside, ranks=ranks)


def text_of(table: Table) -> str:
    """As the console shows it."""
    console = Console(file=io.StringIO(), width=112)
    console.print(table)
    lines = str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]
    return "\n".join(["```", *(line.rstrip() for line in lines), "```"])


def picture(page: Path, path: Path, scratch: Path) -> None:
    """A report's headline, timeline and edges."""
    text = page.read_text(encoding="utf-8")
    shown = ("<h2>Timeline", "<h2>Edges")
    text = _SECTION.sub(lambda found: found[0] if any(head in found[0] for head in shown) else "", text)
    (scratch / "shown.html").write_text(text, encoding="utf-8")
    assert CHROMIUM, MISSING
    where = (f"--user-data-dir={scratch / 'chromium'}", f"--window-size={WIDTH},{HEIGHT}")
    shot = scratch / "shot.png"
    command = [CHROMIUM, *FLAGS, *where, f"--screenshot={shot}", (scratch / "shown.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    image = Image.open(shot).convert("RGB")
    rows = np.asarray(image)
    used = np.flatnonzero((rows != rows[-1, 0]).any(axis=(1, 2)))
    cropped = image.crop((0, 0, image.width, min(image.height, int(used[-1]) + MARGIN)))
    cropped.quantize(128).save(path, optimize=True)


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        folder = Path(sys.argv[1]) if sys.argv[1:] else scratch
        if not (folder / "runs").exists():
            record(folder)
        recordings = {name: load(folder, name) for name in RUNS}
        EXAMPLES.mkdir(exist_ok=True)
        for name, recording in recordings.items():
            write_report(recording, summarize(recording), EXAMPLES / f"{name}.html")
        comparison = compare(*recordings.values())
        write_comparison(comparison, EXAMPLES / "compare.html")
        shown = recordings["with_cache"]
        draw_timeline(shown, summarize(shown), EXAMPLES / "timeline.png")
        picture(EXAMPLES / "with_cache.html", EXAMPLES / "report.png", scratch)
        blocks = {"summary": summary_table(summarize(shown)), "comparison": comparison_table(comparison)}
    page = PAGE.read_text()
    for name, table in blocks.items():
        begin = f"<!-- begin generated: python docs/make_examples.py {name} -->"
        page = replaced(page, begin, text_of(table), PAGE.name)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
