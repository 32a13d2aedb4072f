"""Stand-ins for Slurm, and a real one where one is running."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.slurm.stubs import Stubs, make_stubs


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return make_stubs(tmp_path)


@pytest.fixture(scope="session")
def slurm() -> None:
    """Skips the test unless the Slurm of tests/slurm/cluster.sh answers."""
    if shutil.which("sinfo"):
        found = subprocess.run(["sinfo", "--noheader", "--format=%P %D"], capture_output=True, text=True)
        if "local* 4" in found.stdout:
            return
    pytest.skip("no Slurm of four local nodes: bash tests/slurm/cluster.sh start FOLDER; export SLURM_CONF=...")
