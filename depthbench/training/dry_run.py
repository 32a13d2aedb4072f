"""`depthbench train RUN --dry-run`: every check that training makes before it starts, then stop."""

from depthbench.config.schema import RunConfig
from depthbench.parallel.startup import world_from_environment

from .preflight import preflight


def dry_run(run: RunConfig) -> int:
    """Print what would happen. Raises UserError as training would."""
    _, world_size, _ = world_from_environment()
    ready = preflight(run, world_size, first_of_node=True)
    tokens = sum(int(corpus.indexed.sequence_lengths[corpus.documents].sum()) for corpus in ready.train)
    needed = run.train.steps * run.train.global_batch * run.model.sequence_length
    print(f"{run.name}: settings, data and run folder {ready.folder} are in order for {world_size} processes")
    print(f"  {tokens:,} training tokens; {run.train.steps} steps read {needed:,} ({needed / tokens:.2f} epochs)")
    if ready.finished:
        print("  the run is finished: training would do nothing")
    elif ready.resume:
        print(f"  training would resume from {ready.resume.path}")
    elif ready.initial:
        print(f"  training would start with the weights of {ready.initial.path}")
    return 0
