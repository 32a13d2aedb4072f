"""`depthbench convert export CHECKPOINT OUT` and `depthbench convert import SOURCE OUT`."""

import argparse
import os

from depthbench.errors import UserError

from . import export_command, import_command

ACTIONS = {
    "export": ("write a checkpoint as a Hugging Face model, or for DepthBench's code", export_command),
    "import": (
        "write a Hugging Face model, or a checkpoint of DepthBench's code, as one to train from",
        import_command,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, (text, module) in ACTIONS.items():
        module.add_arguments(actions.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run the action. Returns 0, or 1 where what was written does not compute what its source does; raises UserError
    for what the user can mend."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: convert is one process; start it without torchrun")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # everything runs on the CPU, where float32 is float32
    return ACTIONS[args.action][1].run(args)
