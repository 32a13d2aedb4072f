"""An eleventh architecture is one file and one YAML: those of docs/new_architecture.md, put into a copy of the project.

The copy's own tests then find it: it plans, trains, keeps its declarations, and is the same under every layout.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "learned_scale"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for part in ("depthbench", "configs", "launch", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    page = (ROOT / "docs/new_architecture.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (settings,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (folder / "depthbench/residual" / f"{NAME}.py").write_text(code)
    (folder / "configs/residual" / f"{NAME}.yaml").write_text(settings)
    return folder


def python(folder: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_plans(copy: Path) -> None:
    plan = json.loads(python(copy, "-m", "depthbench", "plan", "depthbench_400m", f"residual={NAME}", "--json"))
    sublayers, width = 2 * 24, 1024
    assert plan["architecture"] == NAME
    assert plan["parameters"]["residual"] == (sublayers + 1) * width + sublayers


def test_the_tests_find_it(copy: Path) -> None:
    folders = ["tests/residual", "tests/parallel", "tests/config"]
    said = python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", *folders, "-k", NAME)
    for test in (
        "test_every_parameter_carries_a_declaration",
        "test_the_state_holds_only_what_is_still_read",
        "test_the_planned_parameters_are_the_built_ones",
        "test_training_in_float64",
    ):
        assert re.search(rf"PASSED .*{test}\[{NAME}", said), said
