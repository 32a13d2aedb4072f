#!/usr/bin/env bash
# Pipelines over NCCL, on two and four GPUs: order and overlap of messages, lifetime of their buffers, every gradient.
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sh" --pipeline "$@"
