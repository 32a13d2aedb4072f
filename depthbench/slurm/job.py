"""What a job's script asks: `python -m depthbench.slurm.job {begin,end,port} ...`, before and after its processes run.

Imports nothing but the standard library and files that do not either: see attempts.py. Talks on stdout, which the
script keeps in the attempt's log.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from depthbench.checkpoint import fence
from depthbench.checkpoint.folder import latest
from depthbench.logs.jsonl import last_lines
from depthbench.training.status import read_status, settle_status

from .attempts import Decision, Ended, Kind, append, decide, job_of, read

NOTHING_TO_DO = 10  # exit statuses that the script reads
REQUEUE = 11
_FIRST_PORT, _PORTS = 10_000, 20_000
_TRIES, _PAUSE_SECONDS = 30, 10.0  # of a requeue: five minutes
_ANSWER_SECONDS = 10.0  # of a question: a job that Slurm ends is killed after KillWait, 30 s by default


def port(job: int, restart: int) -> int:
    """The port at which the ranks of an attempt meet: another for each job, and for each attempt of a job, since a
    survivor of the one before may still hold that one's. job: its id, of its own also in an array.

    Above X11's and Slurm's own, below Linux's ephemeral range (32768 and up), of which any process may take one.
    """
    return _FIRST_PORT + (job + 7919 * restart) % _PORTS


def journal(folder: Path) -> Path:
    return folder / "slurm" / "attempts.jsonl"


def begin(folder: Path, attempt: str, last_step: int, steps: int, max_requeues: int) -> int:
    """Make `attempt` the owner of the run folder. last_step: the last one to train now. steps: of the whole run.

    Returns 0, or NOTHING_TO_DO where the run has reached `last_step`, or 1 where no further attempt should be made.
    """
    saved, before, owner = _saved(folder), read(journal(folder)), fence.owner(folder)
    holder = job_of(owner) if owner else None
    busy = _at_work(holder, folder) if holder and holder != job_of(attempt) else ""
    if saved >= last_step:
        print(f"attempt {attempt}: the run has reached step {saved} of {last_step}; nothing to do")
        if not busy:
            settle_status(folder, saved, steps)
        return NOTHING_TO_DO
    if busy:
        print(f"attempt {attempt}: {busy}")
        return 1
    if owner and holder == job_of(attempt) and owner not in {ended.attempt for ended in before}:
        lost = Ended(
            owner, Kind.LOST, _reached(folder), saved, "Slurm ended and requeued it: preemption or a lost node"
        )
        decision = decide(before, lost, max_requeues)
        append(journal(folder), lost, decision)
        print(f"attempt {owner}: {decision.why}")
        if not decision.requeue:
            return decision.code
    fence.claim(folder, attempt)
    print(f"attempt {attempt}: begins from step {saved} of {last_step}")
    return 0


def end(folder: Path, logs: Path, attempt: str, status: int, interrupted: bool, max_requeues: int) -> int:
    """Note how an attempt ended, decide, and have Slurm requeue the job if that is the decision. status: of srun.
    interrupted: whether the script got SIGTERM.

    Returns the exit status that the job shall have, or REQUEUE where Slurm ends and requeues it now.
    """
    ended = _ended(folder, logs, attempt, status, interrupted)
    before = read(journal(folder))
    decision = decide(before, ended, max_requeues)
    if ended.kind is not Kind.SUPERSEDED:
        append(journal(folder), ended, decision)
    print(f"attempt {attempt}: {decision.why}", flush=True)
    if not decision.requeue:
        return decision.code
    if not (refusal := _requeue(ended.job)):
        return REQUEUE
    refused = Decision(False, f"Slurm refused to requeue the job: {refusal}; go on with: sbatch submit.sbatch")
    append(journal(folder), ended, refused)
    print(f"attempt {attempt}: {refused.why}")
    return refused.code


def _ended(folder: Path, logs: Path, attempt: str, status: int, interrupted: bool) -> Ended:
    saved, reached = _saved(folder), _reached(folder)
    job, restart = attempt.split(".")
    slurm = _slurm("scontrol", "show", "job", "--oneliner", job)
    ending = _ending(slurm) if interrupted and slurm else None  # unknown: resumed once too often rather than lost

    def ended(kind: Kind, reason: str = "", step: int = reached, refused: bool = False) -> Ended:
        return Ended(attempt, kind, step, saved, reason, refused)

    if (owner := fence.owner(folder)) != attempt:
        return ended(Kind.SUPERSEDED, f"attempt {owner} owns the run folder")
    if slurm and (restarts := re.search(r" Restarts=(\d+)", slurm)) and restarts[1] != restart:
        return ended(Kind.SUPERSEDED, f"Slurm gave this node up, and has restarted the job {restarts[1]} times")
    told = read_status(folder)
    if told.get("attempt") == attempt and told["state"] in ("finished", "stopped"):
        if told["state"] == "finished":
            return ended(Kind.FINISHED, step=told["step"])
        if told["reason"].startswith("train.stop_at"):
            return ended(Kind.PAUSED, told["reason"], told["step"])
        if ending is not Kind.CANCELLED:
            return ended(Kind.STOPPED, told["reason"], told["step"])
    if ending is Kind.CANCELLED:
        return ended(ending, "Slurm ended the job: cancelled, or preempted")
    if ending:
        return ended(ending, "the time limit came before a checkpoint was complete")
    if status == 0:  # the trainer found nothing to do
        return ended(Kind.FINISHED)
    if told.get("attempt") == attempt and told["state"] == "failed" and not _errors(logs):
        return ended(Kind.FAILED, told["reason"], told["step"])
    if errors := _errors(logs):
        return ended(Kind.FAILED, errors[0], refused=errors[0].startswith("UserError"))
    return ended(Kind.FAILED, "a process died without a word")


def _saved(folder: Path) -> int:
    newest = latest(folder / "checkpoints")
    return newest.step if newest else 0


def _reached(folder: Path) -> int:
    """The last step that any attempt completed."""
    for line in reversed(last_lines(folder / "metrics.jsonl")):
        with suppress(ValueError, KeyError, TypeError):  # a lost node may leave anything
            return int(line["step"])
    return 0


def _errors(logs: Path) -> list[str]:
    """What processes said when they died, the first to die first: torchrun has each write `error.json` into its logs.
    Later ones are mostly of those that lost a partner. One that was killed while it wrote has said nothing."""
    files = sorted(logs.glob("node-*/**/error.json"), key=lambda file: file.stat().st_mtime_ns)
    found = []
    for file in files:
        with suppress(OSError, ValueError, KeyError, TypeError):
            message = json.loads(file.read_bytes())["message"]
            found.append(str(message["message"] if isinstance(message, dict) else message))
    return found


def _slurm(*words: str, seconds: float = _ANSWER_SECONDS) -> str | None:
    """What a command of Slurm prints: nothing of a job that it has forgotten. None where it is not installed, or has
    failed for so long: its controller may only be away for a moment."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        try:
            return subprocess.run(words, capture_output=True, text=True, check=True, timeout=left).stdout
        except OSError:
            return None
        except subprocess.CalledProcessError as error:
            if "Invalid job id" in error.stderr:
                return ""
            time.sleep(1)
        except subprocess.TimeoutExpired:
            return None
    return None


def _requeue(job: str) -> str:
    """Have Slurm requeue the job, which ends its script. Returns nothing, or what Slurm said if it refused again and
    again: its controller may only be away for a moment."""
    said = ""
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True)
        if done.returncode == 0:
            return ""
        said = done.stderr.strip() or f"scontrol's exit status is {done.returncode}"
        print(f"job {job}: not requeued, {attempt + 1} of {_TRIES} tries: {said}", flush=True)
    return said


def _at_work(job: str, folder: Path) -> str:
    """What keeps another job out of its folder: that it is running, or that Slurm does not say. Else nothing."""
    state = _slurm("squeue", "--noheader", f"--jobs={job}", "--format=%T", seconds=_TRIES * _PAUSE_SECONDS)
    if state is None:
        return f"squeue does not say whether job {job} is still running in {folder}: submit again when it does"
    return f"job {job} is running in {folder}: cancel it, or this job is no use" if "RUNNING" in state else ""


def _ending(slurm: str) -> Kind | None:
    """What a job is that Slurm is ending now: FAILED if its time is over, CANCELLED otherwise; None if it runs on. Its
    state is COMPLETING then, and only the time limit leaves a reason."""
    if "JobState=RUNNING" in slurm:
        return None
    return Kind.FAILED if "Reason=TimeLimit" in slurm else Kind.CANCELLED


def main() -> int:
    parser = argparse.ArgumentParser(prog="depthbench.slurm.job")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("begin", "end", "port"):
        verb = verbs.add_parser(name)
        if name == "port":
            verb.add_argument("--job", type=int, required=True)
            verb.add_argument("--restart", type=int, required=True)
            continue
        verb.add_argument("--attempt", required=True, metavar="JOB[_TASK].RESTART")
        verb.add_argument("--run-folder", type=Path, required=True)
        verb.add_argument("--max-requeues", type=int, required=True)
        if name == "begin":
            verb.add_argument("--last-step", type=int, required=True)
            verb.add_argument("--steps", type=int, required=True)
        else:
            verb.add_argument("--logs", type=Path, required=True)
            verb.add_argument("--status", type=int, required=True)
            verb.add_argument("--interrupted", action="store_true")
    args = parser.parse_args()
    if args.verb == "port":
        print(port(args.job, args.restart))
        return 0
    if args.verb == "begin":
        return begin(args.run_folder, args.attempt, args.last_step, args.steps, args.max_requeues)
    return end(args.run_folder, args.logs, args.attempt, args.status, args.interrupted, args.max_requeues)


if __name__ == "__main__":
    sys.exit(main())
