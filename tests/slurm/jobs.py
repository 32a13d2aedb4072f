"""Jobs that the product submits to a real Slurm, and what becomes of them."""

import contextlib
import io
import json
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

from depthbench.cli import main
from depthbench.config.load import plain
from depthbench.config.schema import RunConfig
from depthbench.slurm.attempts import Ended, read
from depthbench.slurm.job import journal

PATIENCE = 600  # seconds until a test gives up: the machine may have other work
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def slurm(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Submitted:
    """A job and the run folder it trains in."""

    number: str
    folder: Path

    def shown(self) -> str:
        return slurm("scontrol", "show", "job", "--oneliner", self.number)

    @property
    def state(self) -> str:
        (found,) = re.findall(r"JobState=(\S+)", self.shown())
        return str(found)

    @property
    def restarts(self) -> int:
        (found,) = re.findall(r"Restarts=(\d+)", self.shown())
        return int(found)

    @property
    def nodes(self) -> list[str]:
        (found,) = re.findall(r" NodeList=(\S+)", self.shown())
        return slurm("scontrol", "show", "hostnames", found).split()

    @property
    def step(self) -> int:
        """The last one of which there is a line of metrics."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        with contextlib.suppress(ValueError, IndexError):
            return int(json.loads(lines[-1])["step"])
        return 0

    def attempts(self) -> list[Ended]:
        return read(journal(self.folder))

    def began(self, attempt: str) -> int:
        """The step from which its trainer said that it goes on."""
        said = (self.folder / "slurm" / "logs" / attempt / "node-0.log").read_text()
        (found,) = re.findall(r": step (\d+) of \d+, \d+ processes$", said, re.MULTILINE)
        return int(found)

    def assert_each_resumed(self) -> None:
        """Every attempt after the first began where the one before had saved: none from the start, none earlier."""
        for before, after in pairwise(self.attempts()):
            assert self.began(after.attempt) == before.saved > 0, self.log()

    def log(self) -> str:
        """Of all attempts, scripts and processes."""
        files = sorted((self.folder / "slurm" / "logs").rglob("*.log"))
        return "\n".join(f"== {file}\n{file.read_text()}" for file in files)

    def wait_for(self, there: Callable[[], bool], what: str) -> None:
        deadline, look = time.monotonic() + PATIENCE, 0.0
        while not there():
            if (now := time.monotonic()) > look:  # seldom: to ask Slurm may take longer than what is waited for lasts
                state, look = self.state, now + 1
                if now > deadline or (state in ENDED and not there()):
                    raise AssertionError(f"waited in vain for {what}: job {self.number} is {state}\n{self.log()}")
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.step >= step, f"step {step}")

    def finish(self) -> None:
        self.wait_for(lambda: self.state == "COMPLETED", "its end")

    def ends(self) -> str:
        """The state that it ends in, whatever it is."""
        deadline = time.monotonic() + PATIENCE
        while (state := self.state) in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"):
            assert time.monotonic() < deadline, f"job {self.number} does not end\n{self.log()}"
            time.sleep(0.1)
        return state


def submit(run: RunConfig, cluster: str = "local-slurm", *options: str) -> Submitted:
    """`depthbench submit`."""
    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "given.yaml"
    file.write_text(yaml.safe_dump(plain(run)))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["submit", str(file), "--cluster", cluster, *options]) == 0
    (number,) = re.findall(r"submitted job (\d+)", said.getvalue())
    return Submitted(number, folder)


def sbatch(script: Path, folder: Path) -> Submitted:
    """By hand."""
    return Submitted(slurm("sbatch", "--parsable", str(script)).strip(), folder)
