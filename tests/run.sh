#!/usr/bin/env bash
# All tests but the longest; arguments are passed on to pytest (for example: bash tests/run.sh tests/residual -k hc).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash launch/setup.sh
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest "$@"
