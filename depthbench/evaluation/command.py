"""`depthbench evaluate EXPORT`: harness tasks and the domain NLL of a Hugging Face model in a folder."""

import argparse
import importlib.util
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from depthbench.errors import UserError
from depthbench.options import at_least

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("export", type=Path, metavar="EXPORT", help="a folder with a Hugging Face model")
    parser.add_argument("--tasks", metavar="TASK,...", help="of lm-evaluation-harness: its own, or --include-path's")
    parser.add_argument("--include-path", type=Path, metavar="FOLDER", help="YAML files of tasks of your own")
    parser.add_argument(
        "--domain-nll",
        nargs="?",
        const=ALL,
        metavar="TASK,...",
        help="after EXPORT: the six-task NLL (default: all six)",
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="local files of the six (default: from the hub)")
    parser.add_argument("--limit", type=int, metavar="N", help="rows of each task (default: all)")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--max-length", type=int, metavar="N", help="tokens at once (default: the model's positions)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of the weights (default: the files')"
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="after EXPORT: write JSON (default: print it, no tables)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="results.json and every sample's record")


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns 0; raises UserError for what the user can mend."""
    tasks = _names(args.tasks, "--tasks")
    domain = _domain(args.domain_nll)
    if not tasks and not domain:
        raise UserError("nothing to evaluate: give --tasks TASK,... or --domain-nll or both")
    _check(args)
    _need("transformers")
    if tasks:
        _need("lm_eval", "accelerate")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from .export import cap, load, read_config

    # first, as the data and the harness's tasks may take minutes to come
    length = cap(read_config(args.export), args.max_length)
    sets = _sets(domain, args.data, args.limit)
    if tasks:
        from .harness import find_tasks, run_tasks

        manager = find_tasks(tasks, args.include_path)
    model = load(args.export, args.device, args.dtype, length)
    settings = {"max_length": model.max_length, "limit": args.limit, "batch_size": args.batch_size}
    result: dict[str, Any] = {
        "model": model.provenance.as_dict(),
        "settings": {**settings, "device": args.device},
        "packages": {name: version(name) for name in ("depthbench", "torch", "transformers")},
    }
    samples: dict[str, list[dict[str, Any]]] = {}
    if domain:
        from .domain_nll import domain_nll

        with _Bars() as bars:
            scored = domain_nll(model, sets, batch_size=args.batch_size, advance=bars.advance_named)
        result["domain_nll"] = scored.as_dict()
        samples |= {f"domain_{name}": records for name, records in scored.sample_records().items()}
    if tasks:
        ran = run_tasks(model, tasks, manager, batch_size=args.batch_size, limit=args.limit)
        result["harness"] = ran.as_dict()
        samples |= ran.samples
    _write(args, result, samples)
    return 0


def _names(text: str | None, option: str) -> list[str]:
    names = [] if text is None else [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise UserError(f"{option}={text}: give each name once, with commas between")
    return names


def _domain(text: str | None) -> list[str]:
    from .domain import TASKS

    names = list(TASKS) if text == ALL else _names(text, "--domain-nll")
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"--domain-nll={text}: {', '.join(unknown)} is none of {', '.join(TASKS)}")
    return names


def _check(args: argparse.Namespace) -> None:
    at_least(1, args, "limit", "batch_size")
    if args.include_path and not args.tasks:
        raise UserError("--include-path needs --tasks")
    if args.data and not args.domain_nll:
        raise UserError("--data needs --domain-nll")
    if args.json not in (None, "-"):
        if not Path(args.json).absolute().parent.is_dir():
            raise UserError(f"--json={args.json}: its folder does not exist")
        if Path(args.json).is_dir():
            raise UserError(f"--json={args.json} is a folder; give a file in it")
    if args.output and args.output.exists() and (not args.output.is_dir() or any(args.output.iterdir())):
        raise UserError(f"--output={args.output} is not an empty folder; give another")


def _need(*packages: str) -> None:
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(f'{", ".join(absent)} is not installed: pip install "depthbench[eval]"')


def _sets(names: list[str], data: Path | None, limit: int | None) -> list[Any]:
    if not names:
        return []
    from .domain import TASKS
    from .rows import read_sets

    return list(read_sets([TASKS[name] for name in names], data, limit))


class _Bars(Progress):
    """A bar a task, on a terminal."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._named: dict[str, TaskID] = {}

    def advance_named(self, name: str, total: int, more: int) -> None:
        if name not in self._named:
            self._named[name] = self.add_task(name, total=total)
        self.advance(self._named[name], more)


def _write(args: argparse.Namespace, result: dict[str, Any], samples: dict[str, list[dict[str, Any]]]) -> None:
    text = json.dumps(result, indent=2, default=str)
    if args.output:  # first: it holds all, if another place cannot be written
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "results.json").write_text(text + "\n")
        for name, records in samples.items():
            lines = "".join(json.dumps(record, default=str) + "\n" for record in records)
            (args.output / f"samples_{name}.jsonl").write_text(lines)
    if args.json not in (None, "-"):
        Path(args.json).write_text(text + "\n")
    if args.json == "-":
        print(text)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from .report import domain_table, harness_table, model_lines

    console = Console()
    console.print("\n".join(model_lines(result["model"])), highlight=False, soft_wrap=True)
    if "domain_nll" in result:
        console.print(domain_table(result["domain_nll"]))
    if "harness" in result:
        console.print(harness_table(result["harness"]))
