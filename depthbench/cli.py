"""`depthbench VERB RUN [group=name] [dotted.key=value] ...`"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from depthbench import __version__
from depthbench.errors import UserError

DESCRIPTION = """\
Pretrain language models whose residual connection is the experiment.

RUN is a YAML file, or the name of one under configs/runs/ (quickstart, depthbench_400m, depthbench_1600m).
group=name chooses a file of a group:    model=400m_L32  residual=hc  parallel=tp2_sp  data=fineweb_edu_neox
dotted.key=value sets one field:         model.num_layers=8  parallel.tensor=2  train.steps=20  seed=1
"""

EPILOG = """\
examples:
  depthbench prepare --input text/*.txt --output data/text --train-tokenizer 4096 --valid-fraction 0.02
  depthbench plan depthbench_400m residual=hc model=400m_L32
  torchrun --nproc-per-node 2 -m depthbench train quickstart residual=block_attnres train.steps=100
"""


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a YAML file, or a name under configs/runs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="group choices and single settings")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check settings, data and checkpoint, then stop")


def _train(args: argparse.Namespace) -> int:
    from depthbench.config.load import load_run

    run = load_run(args.run, args.overrides)
    if args.dry_run:
        from depthbench.training.dry_run import dry_run

        return dry_run(run)
    from depthbench.training.trainer import train

    return train(run)


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    from depthbench.data import prepare

    prepare.add_arguments(parser)


def _prepare(args: argparse.Namespace) -> int:
    from depthbench.data import prepare

    return prepare.run(args)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    from depthbench.planning import command

    command.add_arguments(parser)


def _plan(args: argparse.Namespace) -> int:
    from depthbench.planning import command

    return command.run(args)


def _profile_arguments(parser: argparse.ArgumentParser) -> None:
    from depthbench.profiling import command

    command.add_arguments(parser)


def _profile(args: argparse.Namespace) -> int:
    from depthbench.profiling import command

    return command.run(args)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    from depthbench.convert import command

    command.add_arguments(parser)


def _convert(args: argparse.Namespace) -> int:
    from depthbench.convert import command

    return command.run(args)


def _prefill_arguments(parser: argparse.ArgumentParser) -> None:
    from depthbench.inference import prefill_command

    prefill_command.add_arguments(parser)


def _prefill(args: argparse.Namespace) -> int:
    from depthbench.inference import prefill_command

    return prefill_command.run(args)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    from depthbench.inference import generate_command

    generate_command.add_arguments(parser)


def _generate(args: argparse.Namespace) -> int:
    from depthbench.inference import generate_command

    return generate_command.run(args)


Verb = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

VERBS: dict[str, Verb] = {
    "prepare": ("turn text, JSONL, Parquet or a Hugging Face dataset into training data", _prepare_arguments, _prepare),
    "train": ("train a run, or resume it", _train_arguments, _train),
    "plan": ("what a run holds, computes, sends and takes, before it runs", _plan_arguments, _plan),
    "profile": ("record what a run's pipeline does, and report it", _profile_arguments, _profile),
    "convert": ("write a checkpoint as a Hugging Face model, and check it", _convert_arguments, _convert),
    "prefill": ("read a long text in chunks: speed, and memory by kind beside the plan", _prefill_arguments, _prefill),
    "generate": ("let a checkpoint's model write on from a prompt", _generate_arguments, _generate),
}


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser; only `verb`'s own arguments are filled in, so that no verb pays for another's imports."""
    parser = argparse.ArgumentParser(
        prog="depthbench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"depthbench {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (text, add_arguments, _) in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=text,
            description=DESCRIPTION if name not in ("prepare", "convert") else text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == verb:
            add_arguments(sub)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 for a mistake of the user, as argparse."""
    words = list(sys.argv[1:] if words is None else words)
    verb = next((word for word in words if word in VERBS), None)
    parser = build_parser(verb)
    args, rest = parser.parse_known_args(words)
    if rest and hasattr(args, "overrides") and all("=" in word and not word.startswith("-") for word in rest):
        args.overrides += rest  # argparse takes no more positionals after an option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return VERBS[args.verb][2](args)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes of the node say the same
            print(f"depthbench: {error}", file=sys.stderr)
        return 2
