#!/usr/bin/env bash
# Makes .venv beside this checkout, or reuses it: a torch that fits the machine, then depthbench and its dependencies.
# The two commands of the README call it; calling it again does nothing.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

torch_cpu=2.13.0
say() { echo "setup: $*"; }

python=${PYTHON:-python3}
"$python" - <<'CHECK' || { echo "setup: $python is too old; set PYTHON to a Python of 3.10 or newer" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 10))
CHECK

if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
stamp=.venv/depthbench-$device-$( (cat setup.py launch/setup.sh; "$python" --version) | sha256sum | cut -c1-16)
if [ -f "$stamp" ]; then exit 0; fi

say "making .venv with $("$python" --version) for $device"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)

if [ $device = cuda ]; then
    say "installing torch for CUDA"
    "${pip[@]}" "torch>=2.6"
    .venv/bin/python -c "import torch; assert torch.cuda.is_available()" || {
        echo "setup: torch does not see the GPU; its CUDA may be newer than the driver. Install a fitting torch into" \
            ".venv (https://pytorch.org/get-started/previous-versions) and run this again" >&2
        exit 1
    }
elif ! .venv/bin/python -c "import torch" 2>/dev/null; then
    # pinned: a looser requirement would download a CUDA build of several GB
    say "installing torch $torch_cpu for CPU"
    "${pip[@]}" "torch==$torch_cpu+cpu" 2>/dev/null ||
        "${pip[@]}" "torch==$torch_cpu+cpu" --index-url https://download.pytorch.org/whl/cpu
fi

# megatron-core 0.16.1 is the newest that declares Python 3.11; later ones are used where pip finds them
say "installing depthbench and its dependencies"
"${pip[@]}" --editable ".[dev]"
touch "$stamp"
say "done"
