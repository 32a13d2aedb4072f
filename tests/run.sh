#!/usr/bin/env bash
# All tests but the longest; arguments are passed on to pytest (for example: bash tests/run.sh tests/residual -k hc).
# As many files at once as there are cores; `-n 0`: one test after the other, in one process.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash launch/setup.sh
export OMP_NUM_THREADS=1
workers=$(OMP_NUM_THREADS="" nproc) # which would heed it
exec .venv/bin/python -m pytest --numprocesses $((workers < 8 ? workers : 8)) --dist loadfile "$@"
