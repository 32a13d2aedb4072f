#!/usr/bin/env bash
# Checks and short runs on a machine with NVIDIA GPUs, in under five minutes; see tests/gpu/run.py for its arguments.
# Uses $PYTHON (default: python3) if it sees a GPU and has what the trainer imports, else .venv through launch/setup.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
python=${PYTHON:-python3}

if [[ "$*" != *--cpu-rehearsal* && "$*" != *--plan* ]] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "tests/gpu: no NVIDIA GPU is seen here, so nothing was run; --cpu-rehearsal runs it with tiny sizes"
    exit 0
fi

lacks() {
    "$python" - <<'CHECK' 2>/dev/null || echo "torch with a GPU"
import importlib.util
import torch
assert torch.cuda.is_available()
names = "megatron.core psutil pydantic yaml rich tensorboard sentencepiece tokenizers numpy pytest".split()
found = {name: importlib.util.find_spec(name.split(".")[0]) for name in names}
print(" ".join(name for name in names if found[name] is None))
CHECK
}

missing=$(lacks)
if [ -n "$missing" ]; then
    echo "tests/gpu: $python lacks: $missing; using .venv"
    bash launch/setup.sh
    python=.venv/bin/python
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m tests.gpu.run "$@"
