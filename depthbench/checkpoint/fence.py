"""Who may write into a run folder: one attempt at a time, where a launcher starts a run again and again.

A node that its scheduler has given up may live on, and with it the processes of an earlier attempt. They find nobody to
talk to and end, but not at once. So a launcher names each attempt (depthbench.slurm: job id and restart count), writes
that name into the folder before it starts processes, and hands it to them. They look whether it is still theirs when
they start, and before each line of metrics, each checkpoint (when it is published, before older ones are deleted) and
each status. Not fenced: recordings in `profile/`, and the cache of sample indices, which are the same for all attempts.

Between a look and what is written after it the folder may change hands. What that can do:

- a checkpoint is published by renaming `.saving-…`. The next attempt renames such folders first, so either the rename
  fails, or it came before and what was published is whole: a step of the same run. Where the name is taken a survivor
  looks again, and never removes a complete checkpoint;
- `metrics.jsonl` is replaced by the next attempt's copy, and a survivor goes on writing to the old file, unlinked. Only
  one that starts, and is held up between its look and its own cut of the file, can replace the next attempt's copy, and
  so lose lines of metrics; no checkpoint depends on them;
- TensorBoard's readers drop what a survivor adds to its own, older file past the step where the next attempt began;
- `status.json` may say for a moment what the survivor said; the next attempt writes it at its start and its end.

Imports nothing but the standard library: see folder.py.
"""

import os
from pathlib import Path

VARIABLE = "DEPTHBENCH_ATTEMPT"
_FILE = "attempt"


class SupersededError(RuntimeError):
    """Another attempt owns the run folder now."""


def claim(folder: Path, attempt: str) -> None:
    """Make `attempt` the owner of the run folder."""
    partial = folder / f"{_FILE}.{attempt}.tmp"
    partial.write_text(attempt)
    partial.replace(folder / _FILE)


def owner(folder: Path) -> str | None:
    """The attempt that owns the run folder; None if no launcher ever claimed it."""
    try:
        return (folder / _FILE).read_text()
    except FileNotFoundError:
        return None


class Fence:
    """attempt: this process's; None, without a launcher that names attempts, is let through always."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempt = folder, os.environ.get(VARIABLE)

    def check(self) -> None:
        """Raise SupersededError if the run folder has another owner."""
        if self.attempt and (now := owner(self.folder)) != self.attempt:
            raise SupersededError(
                f"attempt {self.attempt} no longer owns {self.folder}: attempt {now} does; nothing more is written"
            )
