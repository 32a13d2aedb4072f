"""`depthbench VERB RUN [group=name] [dotted.key=value] ...`"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

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


class Verb(NamedTuple):
    """module: has `add_arguments(parser)` and `run(args) -> exit status`; imported only when the verb is used.
    takes_run: whether its arguments are a RUN and settings."""

    text: str
    module: str
    takes_run: bool


VERBS = {
    "prepare": Verb("turn text, JSONL, Parquet or a Hugging Face dataset into training data", "data.prepare", False),
    "train": Verb("train a run, or resume it", "training.command", True),
    "submit": Verb("train a run as a job of several nodes under Slurm", "slurm.command", True),
    "plan": Verb("what a run holds, computes, sends and takes, before it runs", "planning.command", True),
    "profile": Verb("record what a run's pipeline does, and report it", "profiling.command", True),
    "runs": Verb("list run folders and where they stand", "logs.runs_command", False),
    "convert": Verb("checkpoints to Hugging Face models and back, checked", "convert.command", False),
    "evaluate": Verb("run lm-evaluation-harness tasks and the domain NLL on an export", "evaluation.command", False),
    "prefill": Verb(
        "read a long text in chunks: speed, and memory by kind beside the plan", "inference.prefill_command", False
    ),
    "generate": Verb("let a checkpoint's model write on from a prompt", "inference.generate_command", False),
}


def _module(verb: str) -> Any:
    return importlib.import_module(f"depthbench.{VERBS[verb].module}")


def build_parser(verb: str | None) -> argparse.ArgumentParser:
    """The parser; only `verb`'s own arguments are filled in, so that none pays for another's imports."""
    parser = argparse.ArgumentParser(
        prog="depthbench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"depthbench {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, each in VERBS.items():
        sub = verbs.add_parser(
            name,
            help=each.text,
            description=DESCRIPTION if each.takes_run else each.text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == verb:
            _module(name).add_arguments(sub)
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
        code: int = _module(args.verb).run(args)
        return code
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other processes of the node say the same
            print(f"depthbench: {error}", file=sys.stderr)
        return 2
