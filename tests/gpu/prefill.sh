#!/usr/bin/env bash
# Long texts on one GPU, in under six minutes: 1.6B Block AttnRes at 32K and 128K tokens, and the paper's 4096 x 8.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --prefill "$@"
