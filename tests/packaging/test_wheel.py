"""An installed wheel finds its own configs and launch files, from anywhere."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def yaml_files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*.yaml")}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_every_config_is_in_the_repository() -> None:
    """What an ignore pattern hides is here on disk, and missing in a clone."""
    for folder in ("configs", "launch"):
        command = ["git", "ls-files", folder]
        listed = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
        assert {Path(line) for line in listed.split()} >= {Path(folder) / file for file in yaml_files(ROOT / folder)}


def test_a_wheel_carries_its_files(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def python(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, *words]
        return subprocess.run(
            command, check=True, cwd=elsewhere, env=environment, capture_output=True, text=True
        ).stdout

    where = "import depthbench.paths as p; print(p.__file__, p.CONFIGS, p.LAUNCH)"
    for path in python("-c", where).split():
        assert path.startswith(str(site))
        assert Path(path).exists()
    plan = json.loads(python("-m", "depthbench", "plan", "depthbench_400m", "residual=full_attnres", "--json"))
    assert plan["parameters"]["total"] == 405505024
    for folder in ("configs", "launch"):
        assert yaml_files(site / "depthbench" / folder) == yaml_files(ROOT / folder)
    for script in (ROOT / "launch").rglob("*.sh"):
        assert (site / "depthbench" / script.relative_to(ROOT)).is_file()
