"""Every setting of a run. Field comments are the reference; YAML files and `key=value` overrides fill them.

The residual section is not here: its schema is the chosen architecture's own config class.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.model.recompute import Recompute


class Precision(enum.Enum):
    """bf16: bfloat16 weights and activations, float32 master weights, moments and gradients (the default).
    reference: everything bfloat16, as the published DepthBench runs. fp32, fp64: throughout."""

    BF16 = "bf16"
    REFERENCE = "reference"
    FP32 = "fp32"
    FP64 = "fp64"


@dataclass(frozen=True)
class ParallelConfig:
    """The layout. Data parallelism takes the ranks that tensor and pipeline parallelism leave."""

    tensor: int = 1  # ranks that share each matmul
    sequence: bool = False  # sequence parallelism: norms and depth state hold S / tensor tokens a rank
    pipeline: int = 1  # stages
    virtual_pipeline: int = 1  # chunks a stage (interleaved schedule)
    context: int = 1  # ranks along the sequence inside attention: refused, see `validate.py`
    distributed_optimizer: bool = True  # shard master weights and moments over data-parallel ranks
    overlap_grad_reduce: bool = False  # reduce gradients while backward goes on
    overlap_param_gather: bool = False  # gather updated weights while the next forward goes on
    bucket_size: int | None = None  # parameters a gradient bucket; null: one bucket, or 40M where overlap needs several
    recompute: Recompute = Recompute.NONE

    @property
    def shards_tokens(self) -> bool:
        """Whether sequence parallelism is on: without tensor parallelism there is nothing to share."""
        return self.sequence and self.tensor > 1


@dataclass(frozen=True)
class PipelineConfig:
    """How stages work together where `parallel.pipeline` is above 1."""

    blocks_per_chunk: list[int] | None = None  # blocks of each chunk in depth order; null: evenly
    microbatch_group: int | None = None  # microbatches a chunk runs before the next chunk; null: as many as stages
    overlap_p2p: bool = False  # send and receive behind computation (needs parallel.virtual_pipeline)
    history_cache: bool = True  # a stage keeps history for its later chunks; false: it is sent again each time
    timeout: float | None = 1800.0  # seconds to wait for a message before the run is given up; null: for ever
    check_headers: bool | None = None  # read what each message says it is; null: on a CPU (on a GPU that is a wait)


@dataclass(frozen=True)
class DataSource:
    """One prepared corpus: path prefix of its .bin and .idx, and its share of a blend."""

    prefix: str
    weight: float = 1.0


class EvalForm(enum.Enum):
    """windows: the validation stream cut as in training. documents: one document an instance, its first tokens, padded
    (the DepthBench paper's form)."""

    WINDOWS = "windows"
    DOCUMENTS = "documents"


@dataclass(frozen=True)
class DataConfig:
    train: list[DataSource]  # blended by weight
    tokenizer: str  # SentencePiece .model, tokenizer.json, or the folder of one
    valid: list[DataSource] = field(default_factory=list)  # empty: `valid_fraction` of every train corpus
    valid_fraction: float = 0.0  # last part of each train corpus's documents, kept out of training
    eval_form: EvalForm = EvalForm.WINDOWS
    index_cache: str | None = None  # folder for sample indices; null: `index-cache` in the run folder
    workers: int = 2  # loader processes a rank; 0 loads in the trainer


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float  # peak
    min_lr_ratio: float = 0.1  # the last step's rate over the peak
    warmup_fraction: float = 0.1  # of train.steps
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on every parameter whose architecture does not exempt it
    clip_norm: float = 1.0  # global gradient norm; 0: no clipping


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    global_batch: int  # sequences a step, over all ranks
    micro_batch: int  # sequences a forward pass and rank
    precision: Precision = Precision.BF16
    stop_at: int | None = None  # stop after this step without bending the schedule
    eval_every: int = 200  # steps; 0: never; the last step always evaluates unless 0
    eval_sequences: int | None = None  # how many; null: the whole split
    spike_factor: float = 0.0  # skip an update whose gradient norm exceeds this times its recent median; 0: never skip
    deterministic: bool = False  # on a GPU: bit-equal reruns, slower; a CPU always is
    spike_window: int = 128  # steps of gradient norms that the median is taken over


class CheckpointMode(enum.Enum):
    """sync: training waits for the files. async: a forked writer makes them from a snapshot."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 1000  # steps; 0: only at the end and on a signal
    keep: int = 2  # newest complete ones kept; 0: all
    mode: CheckpointMode = CheckpointMode.SYNC


@dataclass(frozen=True)
class LogConfig:
    every: int = 1  # steps between console lines (JSONL and TensorBoard get every step)
    tensorboard: bool = True
    wandb_project: str | None = None  # null: off
    layer_stats_every: int = 0  # steps between per-block statistics; 0: never
    peak_tflops: float | None = None  # dense peak of one device, for MFU; null: looked up by the device's name


@dataclass(frozen=True)
class ProfileConfig:
    """Recording of a few steps of a training job; `depthbench profile` makes one of its own."""

    steps: list[int] | None = None  # first and last step to record, from 1; null: none
    torch_trace: bool = False  # also torch.profiler's trace of each rank
    memory_snapshot: bool = False  # also CUDA's memory history of each rank


@dataclass(frozen=True)
class RunConfig:
    name: str
    model: ModelConfig
    architecture: str  # name of the residual architecture
    residual: Any  # its own config object
    parallel: ParallelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    seed: int = 0  # initial weights and data order
    initial: str | None = None  # checkpoint or run folder whose weights the run starts from; null: drawn from the seed
    run_dir: str | None = None  # null: runs/<name>

    @property
    def folder(self) -> str:
        return self.run_dir or f"runs/{self.name}"


def positive(section: str, **values: float | None) -> None:
    """Raise UserError for the first value that is given and not above zero (NaN is not)."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise UserError(f"{section}.{name}={value} must be above 0")


def not_negative(section: str, **values: float) -> None:
    """Raise UserError for the first value below zero (or NaN)."""
    for name, value in values.items():
        if not value >= 0:
            raise UserError(f"{section}.{name}={value} must be at least 0")
