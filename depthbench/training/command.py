"""`depthbench train RUN`: train a run, or resume it."""

import argparse

from depthbench.config.load import load_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("run", metavar="RUN", help="a YAML file, or a name under configs/runs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="group choices and single settings")
    parser.add_argument("--dry-run", action="store_true", help="check settings, data and checkpoint, then stop")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status; raises UserError for what the user can mend."""
    settings = load_run(args.run, args.overrides)
    if args.dry_run:
        from .dry_run import dry_run

        return dry_run(settings)
    from torch.distributed.elastic.multiprocessing.errors import record

    from .trainer import train

    status = record(train)(settings)  # under torchrun an error is left in a file, which a Slurm job reads
    assert status is not None
    return status
