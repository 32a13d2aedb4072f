"""Each check that spans sections refuses, with the numbers and the way out in the message."""

import re
from pathlib import Path

import pytest

from depthbench.config.load import load_run
from depthbench.config.validate import check_run, data_parallel
from depthbench.errors import UserError

SAMPLE = str(Path(__file__).with_name("sample_run.yaml"))

REFUSED: list[tuple[str, int, str]] = [
    # one value out of its range
    ("train.steps=0", 1, "train.steps=0 must be above 0"),
    ("train.global_batch=-32", 1, "train.global_batch=-32 must be above 0"),
    ("train.micro_batch=0", 1, "train.micro_batch=0 must be above 0"),
    ("train.spike_window=0", 1, "train.spike_window=0 must be above 0"),
    ("train.stop_at=0", 1, "train.stop_at=0 must be above 0"),
    ("train.eval_sequences=0", 1, "train.eval_sequences=0 must be above 0"),
    ("train.eval_every=-1", 1, "train.eval_every=-1 must be at least 0"),
    ("train.spike_factor=-2", 1, "train.spike_factor=-2.0 must be at least 0"),
    ("optimizer.lr=0", 1, "optimizer.lr=0.0 must be above 0"),
    ("optimizer.lr=.nan", 1, "optimizer.lr=nan must be above 0"),
    ("optimizer.eps=0", 1, "optimizer.eps=0.0 must be above 0"),
    ("optimizer.weight_decay=-0.1", 1, "optimizer.weight_decay=-0.1 must be at least 0"),
    ("optimizer.clip_norm=-1", 1, "optimizer.clip_norm=-1.0 must be at least 0"),
    ("optimizer.min_lr_ratio=2", 1, "optimizer.min_lr_ratio=2.0 must lie between 0 and 1"),
    ("optimizer.warmup_fraction=-0.1", 1, "optimizer.warmup_fraction=-0.1 must lie between 0 and 1"),
    ("optimizer.beta1=1", 1, "optimizer.beta1=1.0 must be at least 0 and below 1"),
    ("optimizer.beta2=-0.5", 1, "optimizer.beta2=-0.5 must be at least 0 and below 1"),
    ("checkpoint.every=-1", 1, "checkpoint.every=-1 must be at least 0"),
    ("checkpoint.keep=-1", 1, "checkpoint.keep=-1 must be at least 0"),
    ("log.every=0", 1, "log.every=0 must be above 0"),
    ("log.layer_stats_every=-1", 1, "log.layer_stats_every=-1 must be at least 0"),
    ("log.peak_tflops=0", 1, "log.peak_tflops=0.0 must be above 0"),
    ("data.workers=-1", 1, "data.workers=-1 must be at least 0"),
    ("data.valid_fraction=1", 1, "data.valid_fraction=1.0 must be at least 0 and below 1"),
    ("parallel.tensor=0", 1, "parallel.tensor=0 must be above 0"),
    ("parallel.bucket_size=0", 1, "parallel.bucket_size=0 must be above 0"),
    # data
    ("data.train=[]", 1, "data.train names no corpus"),
    ("data.train=[{prefix: corpus, weight: 0}]", 1, "weight=0.0 of corpus corpus must be above 0; leave it out"),
    ("data.valid=[{prefix: held, weight: -1}]", 1, "weight=-1.0 of corpus held must be above 0"),
    ("data.valid=[]", 1, "no validation data: set data.valid or data.valid_fraction, or train.eval_every=0"),
    # the residual architecture at the model's shape
    ("residual.num_blocks=13", 1, "residual.num_blocks=13 must lie in 1..12"),
    ("residual.sublayers_per_block=3", 1, "one of them; got 3 and 4"),
    ("residual.num_blocks=null", 1, "one of them; got None and None"),
    (
        "residual.num_blocks=null residual.sublayers_per_block=0",
        1,
        "residual.sublayers_per_block=0 must lie in 1..12",
    ),
    ("residual.temperature=0", 1, "residual.temperature=0.0 must be above 0"),
    ("residual.read_norm_eps=-1e-6", 1, "residual.read_norm_eps=-1e-06 must be at least 0"),
    ("residual=mhc residual.sinkhorn_eps=.nan", 1, "residual.sinkhorn_eps=nan must be at least 0"),
    ("residual=hc residual.num_streams=0", 1, "residual.num_streams=0 must be at least 1"),
    # the layout
    ("parallel.context=2", 2, "parallel.context=2: context parallelism is not supported"),
    ("parallel.tensor=4", 4, "model.num_attention_heads=6 is not divisible by parallel.tensor=4"),
    ("parallel.tensor=3", 3, "model.num_kv_heads=2 is not divisible by parallel.tensor=3"),
    (
        "parallel.tensor=2 model.ffn_hidden_size=511",
        2,
        "model.ffn_hidden_size=511 is not divisible by parallel.tensor=2",
    ),
    (
        "parallel=tp2_sp model.sequence_length=127",
        2,
        "model.sequence_length=127 is not divisible by parallel.tensor=2, as parallel.sequence needs",
    ),
    ("parallel.tensor=2", 3, "3 processes cannot hold parallel.tensor=2 x parallel.pipeline=1 = 2 ranks a model copy"),
    ("parallel.overlap_param_gather=true", 1, "parallel.overlap_grad_reduce=true (it is false)"),
    ("pipeline.overlap_p2p=true", 1, "pipeline.overlap_p2p=true needs the interleaved schedule"),
    ("pipeline.timeout=-1", 1, "pipeline.timeout=-1.0 must be above 0"),
    (
        "parallel=dp parallel.distributed_optimizer=false",
        1,
        "parallel.overlap_param_gather=true needs parallel.distributed_optimizer=true (it is false)",
    ),
    ("train.precision=fp64", 1, "train.precision=fp64 needs parallel.distributed_optimizer=false"),
    ("train.precision=reference", 1, "train.precision=reference needs parallel.distributed_optimizer=false"),
    (
        "train.global_batch=24",
        2,
        "train.global_batch=24 is not a multiple of train.micro_batch=16 x 2 data-parallel ranks = 32",
    ),
]


def test_the_sample_passes() -> None:
    for world_size in (1, 2):
        check_run(load_run(SAMPLE, []), world_size)
    check_run(load_run(SAMPLE, ["train.precision=fp64", "parallel.distributed_optimizer=false"]), 1)
    check_run(load_run(SAMPLE, ["data.valid=[]", "data.valid_fraction=0.1"]), 1)
    check_run(load_run(SAMPLE, ["data.valid=[]", "train.eval_every=0"]), 1)


@pytest.mark.parametrize(("words", "world_size", "message"), REFUSED, ids=[words for words, _, _ in REFUSED])
def test_what_cannot_run_is_refused(words: str, world_size: int, message: str) -> None:
    overrides = [words] if "[" in words else words.split()
    run = load_run(SAMPLE, overrides)
    with pytest.raises(UserError, match=re.escape(message)):
        check_run(run, world_size)


def test_data_parallelism_takes_what_is_left() -> None:
    assert data_parallel(load_run(SAMPLE, ["parallel=tp2"]), 8) == 4
