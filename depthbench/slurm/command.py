"""`depthbench submit RUN --cluster NAME`: a run as a job of several nodes, checked before it is queued."""

import argparse
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copy

from depthbench.config.load import dump_yaml, load_run, plain, read_yaml, typed
from depthbench.config.schema import RunConfig
from depthbench.errors import UserError
from depthbench.logs.overview import REFUSED
from depthbench.options import at_least
from depthbench.planning.cluster import load_cluster
from depthbench.planning.command import show
from depthbench.planning.plan import Plan
from depthbench.training.preflight import preflight

from . import snapshot
from .placement import check_nodes, checked_plan, least_nodes
from .script import TEMPLATES, Job, render
from .settings import SlurmSettings, load_slurm
from .sweep import array_script, assignment, load_sweep, members

MAX_REQUEUES = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("run", metavar="RUN", help="a YAML file, or a name under configs/runs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="group choices and single settings")
    parser.add_argument("--cluster", metavar="NAME", required=True, help="a name under launch/clusters/ or a YAML file")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes (default: as one copy of the model needs)")
    parser.add_argument("--time", metavar="LIMIT", help="time limit of an attempt, D-H:M:S (default: the cluster's)")
    parser.add_argument(
        "--max-requeues",
        type=int,
        default=MAX_REQUEUES,
        metavar="N",
        help=f"attempts after the first, for whatever reason (default: {MAX_REQUEUES})",
    )
    parser.add_argument("--array", metavar="SWEEP", help="many runs: a name under configs/sweeps/ or a YAML file")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and the script; submit nothing")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status; raises UserError for what the user can mend."""
    at_least(0, args, "max_requeues")
    if args.array:
        return _run_array(args)
    submission = _checked(args, args.overrides)
    show(submission.plan)
    if args.dry_run:
        print(submission.script)
        return _dry(submission)
    submission.write()
    return _submit(
        submission.job.submission / "submit.sbatch",
        [submission],
        f"logs: {submission.job.run_folder}/slurm/logs/{{}}.0, after a requeue {{}}.1",
    )


def _run_array(args: argparse.Namespace) -> int:
    name, sweep = load_sweep(args.array)
    given = {word.partition("=")[0] for word in args.overrides} | sweep.grid.keys()
    if own := sorted(given & {"name", "run_dir"}):
        raise UserError(
            f"{own[0]}=... cannot be set with --array: each run's name and folder come from the sweep's, "
            f"runs/{name}/VALUES; rename the sweep's file, or start in another folder"
        )
    root = Path.cwd() / "runs" / name
    found = [
        _checked(
            args,
            [
                *args.overrides,
                *words,
                assignment("run_dir", str(root / member)),
                assignment("name", f"{name}-{member}"),
            ],
        )
        for member, words in members(sweep).items()
    ]
    nodes = {submission.job.nodes for submission in found}
    if len(nodes) > 1:
        raise UserError(
            f"the runs of {args.array} need {min(nodes)} to {max(nodes)} nodes; give one number with --nodes"
        )
    for submission in found:
        job, plan = submission.job, submission.plan
        print(
            f"{job.name}: {plan.parameters.total:,} parameters, {plan.peak_memory / 2**30:.1f} GiB on the fullest rank"
        )
    script = array_script(name, [one.job for one in found], found[0].slurm, sweep.limit)
    if args.dry_run:
        print(script)
        print(f"depthbench: {len(found)} runs, {sweep.limit} at a time; the script of the first:\n")
        print(found[0].script)
        return _dry(found[0])
    for submission in found:
        submission.write()
    file = root / "submit.sbatch"
    file.write_text(script, encoding="utf-8")
    return _submit(file, found, f"{len(found)} runs, {sweep.limit} at a time, in {root}")


@dataclass(frozen=True)
class Submission:
    """A job that has passed all checks, and is not written yet."""

    settings: RunConfig
    job: Job
    slurm: SlurmSettings
    plan: Plan
    script: str

    def write(self) -> None:
        write_submission(self.job, self.settings, self.script)


def _checked(args: argparse.Namespace, overrides: list[str]) -> Submission:
    settings = absolute(load_run(args.run, overrides))
    cluster, slurm = load_cluster(args.cluster), load_slurm(args.cluster)
    if args.time:
        slurm = replace(slurm, time_limit=args.time)
    nodes = least_nodes(settings, cluster) if args.nodes is None else args.nodes
    plan = checked_plan(settings, cluster, nodes)
    job = _job(settings, nodes, cluster.gpus_per_node, args.max_requeues)
    script = render(job, slurm)
    if not args.dry_run:
        check_nodes(nodes, slurm.partition)
        if slurm.container is None:  # in one, the data may lie elsewhere
            preflight(settings, plan.world_size, first_of_node=False)
    return Submission(settings, job, slurm, plan, script)


def _dry(submission: Submission) -> int:
    """What a submission would ask Slurm, where it can be asked."""
    try:
        check_nodes(submission.job.nodes, submission.slurm.partition)
    except UserError as error:
        print(f"depthbench: could not be submitted from here: {error}", file=sys.stderr)
    return 0


def absolute(settings: RunConfig) -> RunConfig:
    """The run with all its paths absolute: a job starts in another folder."""

    def path(text: str) -> str:
        return str(Path.cwd() / text)

    data = settings.data
    return replace(
        settings,
        run_dir=path(settings.folder),
        initial=settings.initial and path(settings.initial),
        data=replace(
            data,
            train=[replace(source, prefix=path(source.prefix)) for source in data.train],
            valid=[replace(source, prefix=path(source.prefix)) for source in data.valid],
            tokenizer=path(data.tokenizer),
            index_cache=data.index_cache and path(data.index_cache),
        ),
    )


def _job(settings: RunConfig, nodes: int, gpus_per_node: int, max_requeues: int) -> Job:
    folder = Path(settings.folder)
    number = 1
    while (submission := folder / "slurm" / str(number)).exists():
        number += 1
    return Job(
        name=settings.name,
        run_folder=folder,
        submission=submission,
        python=sys.executable,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        last_step=min(settings.train.steps, settings.train.stop_at or settings.train.steps),
        steps=settings.train.steps,
        max_requeues=max_requeues,
    )


def write_submission(job: Job, settings: RunConfig, script: str) -> None:
    """Everything that the job needs, in a folder of its own that no later submission changes.

    Raises UserError where the folder cannot be written, or as `write_settings`.
    """
    try:
        job.submission.mkdir(parents=True)
        (job.submission / "submit.sbatch").write_text(script, encoding="utf-8")
        write_settings(job.submission / "run.yaml", settings)
        copy(TEMPLATES / "node.sh", job.submission)
        snapshot.take(job.submission / "code")
    except UserError:
        raise
    except (OSError, ValueError) as error:  # also a path with characters that no file name can have
        raise UserError(f"cannot write the submission {str(job.submission)!r}: {error}") from error


def write_settings(file: Path, settings: RunConfig) -> None:
    """The run's resolved settings. Raises UserError where they would be read back as others, or not at all."""
    try:
        file.write_text(dump_yaml(plain(settings)), encoding="utf-8")
        same = typed(read_yaml(file)) == settings
    except (UserError, UnicodeError):
        same = False
    if not same:
        raise UserError("a name, path or other value of the run has characters that a YAML file cannot hold; rename it")


def _submit(file: Path, submissions: list[Submission], where: str) -> int:
    """submissions: of the runs that the script starts. where: what to tell besides; {} stands for the job's number."""
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"sbatch is not on PATH: submit {file} where Slurm is installed") from None
    if done.returncode:
        for submission in submissions:
            (submission.job.submission / REFUSED).write_text(done.stderr.strip(), encoding="utf-8")
        raise UserError(f"Slurm refused the job: {done.stderr.strip()}. The script is {file}")
    number = done.stdout.strip().split(";")[0]
    print(f"submitted job {number}: {file}")
    print(where.replace("{}", number))
    return 0
