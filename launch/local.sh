#!/usr/bin/env bash
# Trains a run on this machine, as `depthbench submit` does on several: bash launch/local.sh RUN [key=value ...]
# PROCESSES: how many (default: one for each GPU, without GPUs two). PYTHON: the interpreter (default: .venv's, which
# launch/setup.sh makes). Run it again to resume.
set -euo pipefail
[ $# -gt 0 ] || { echo "local: bash launch/local.sh RUN [key=value ...]" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    bash "$root/launch/setup.sh"
    PYTHON=$root/.venv/bin/python
fi

gpus=$(nvidia-smi -L 2> /dev/null | wc -l) || gpus=0
processes=${PROCESSES:-$((gpus > 0 ? gpus : 2))}
if [ "$gpus" -lt "$processes" ]; then export CUDA_VISIBLE_DEVICES=""; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$processes" -m depthbench train "$@"
