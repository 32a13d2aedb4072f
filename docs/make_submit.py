"""Writes docs/examples/submit.sbatch: the job script of the command in docs/slurm.md.

python docs/make_submit.py            # write
python docs/make_submit.py --check    # exit with 1 if the file is not up to date
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from depthbench.config.load import load_run
from depthbench.planning.cluster import load_cluster
from depthbench.slurm.command import MAX_REQUEUES
from depthbench.slurm.placement import checked_plan
from depthbench.slurm.script import Job, render
from depthbench.slurm.settings import load_slurm

if TYPE_CHECKING:
    from docs.make_reference import settle
else:  # as a script, this folder is on the path
    from make_reference import settle

FILE = Path(__file__).parent / "examples" / "submit.sbatch"


def script() -> str:
    """For a checkout and its .venv in /home/me/depthbench."""
    run, cluster, nodes = load_run("depthbench_1600m", ["residual=block_attnres"]), load_cluster("a100-80gb"), 4
    checked_plan(run, cluster, nodes)
    root = Path("/home/me/depthbench")
    folder = root / run.folder
    job = Job(
        name=run.name,
        run_folder=folder,
        submission=folder / "slurm" / "1",
        python=str(root / ".venv/bin/python"),
        nodes=nodes,
        gpus_per_node=cluster.gpus_per_node,
        last_step=run.train.steps,
        steps=run.train.steps,
        max_requeues=MAX_REQUEUES,
    )
    return render(job, load_slurm("a100-80gb"))


def main() -> int:
    return settle(FILE, script())


if __name__ == "__main__":
    sys.exit(main())
