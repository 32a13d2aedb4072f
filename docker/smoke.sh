#!/usr/bin/env bash
# Whether an installed depthbench works, in half a minute and without a network: it says its version, prepares a text,
# trains on it in two processes with a pipeline, finds that it is finished, and exports what it trained.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1

depthbench --version
python - > text.jsonl <<'TEXT'
import json
import random
from pathlib import Path

words = Path(random.__file__).read_text().split()
random.seed(0)
for _ in range(200):
    print(json.dumps({"text": " ".join(random.choices(words, k=200))}))
TEXT
depthbench prepare --input text.jsonl --output text --train-tokenizer 400 --valid-fraction 0.1
settings=(
    name=smoke run_dir=run residual=block_attnres residual.num_blocks=2 parallel=pp2
    model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=128 model.num_attention_heads=2
    model.sequence_length=64 model.vocab_size=400
    "data.train=[{prefix: text_train}]" "data.valid=[{prefix: text_valid}]" data.tokenizer=text.model data.workers=0
    train.steps=4 train.global_batch=4 train.micro_batch=1 train.eval_every=4
)
train=(torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m depthbench train quickstart "${settings[@]}")
"${train[@]}"
"${train[@]}" | grep "is finished"
depthbench convert export run export
echo "depthbench works here"
