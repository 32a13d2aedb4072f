"""Stand-ins for Slurm, and a real one where one is running."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.slurm.stubs import Stubs, make_stubs


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return make_stubs(tmp_path)


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skips the test without the Slurm of tests/slurm/cluster.sh. One that should be there, but does not answer, is a
    failure."""
    if not os.environ.get("SLURM_CONF"):
        pytest.skip("no Slurm of four local nodes: bash tests/slurm/cluster.sh start FOLDER; export SLURM_CONF=...")
    found = subprocess.run(["sinfo", "--noheader", "--format=%P %D"], capture_output=True, text=True, timeout=120)
    if "local* 4" not in found.stdout:
        pytest.fail(f"no four local nodes under SLURM_CONF={os.environ['SLURM_CONF']}: {found.stdout}{found.stderr}")
