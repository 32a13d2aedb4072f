"""Checks that span sections, made before any process group starts."""

from depthbench.errors import UserError
from depthbench.pipeline.edges import Local
from depthbench.pipeline.layout import Layout, layout
from depthbench.residual import Residual, architecture

from .schema import Precision, RunConfig, not_negative, positive


def residual_of(run: RunConfig) -> Residual:
    """The run's architecture at the run's shape.

    Raises UserError where the residual settings cannot work at this shape.
    """
    try:
        return architecture(run.architecture)(run.residual, run.model.residual_shape)
    except ValueError as error:
        raise UserError(str(error)) from error


def layout_of(run: RunConfig) -> Layout:
    """Which blocks each stage holds.

    Raises UserError where they do not divide as the settings say.
    """
    parallel = run.parallel
    try:
        return layout(run.model.num_layers, parallel.pipeline, parallel.virtual_pipeline, run.pipeline.blocks_per_chunk)
    except ValueError as error:
        raise UserError(str(error)) from error


def local_share(run: RunConfig) -> Local:
    """What a rank holds of a state tensor."""
    return Local(
        sequence=run.model.sequence_length,
        microbatch=run.train.micro_batch,
        tensor_parallel=run.parallel.tensor,
        sequence_parallel=run.parallel.shards_tokens,
    )


def microbatch_group(run: RunConfig) -> int:
    return run.pipeline.microbatch_group or run.parallel.pipeline


def check_pipeline(run: RunConfig) -> None:
    """Raise UserError for settings of `pipeline` that are out of range, or that the layout has no use for."""
    parallel, pipeline = run.parallel, run.pipeline
    positive("pipeline", timeout=pipeline.timeout, microbatch_group=pipeline.microbatch_group)
    interleaved = parallel.virtual_pipeline > 1
    if pipeline.overlap_p2p and not interleaved:
        raise UserError(
            "pipeline.overlap_p2p=true needs the interleaved schedule: parallel.virtual_pipeline is "
            f"{parallel.virtual_pipeline}; set it to 2 or more, or pipeline.overlap_p2p=false"
        )
    if pipeline.microbatch_group and not interleaved:
        raise UserError(
            f"pipeline.microbatch_group={pipeline.microbatch_group} needs the interleaved schedule: "
            f"parallel.virtual_pipeline is {parallel.virtual_pipeline}; set it to 2 or more, or "
            "pipeline.microbatch_group=null"
        )


def _check_schedule(run: RunConfig, replicas: int) -> None:
    """What Megatron-Core's pipeline schedules refuse, some of them only in the middle of a step."""
    check_pipeline(run)
    train = run.train
    count, stages = train.global_batch // (train.micro_batch * replicas), run.parallel.pipeline
    named = (
        f"{count} microbatches a step (train.global_batch={train.global_batch} / train.micro_batch="
        f"{train.micro_batch} / {replicas} data-parallel ranks)"
    )
    if count < stages:
        raise UserError(
            f"{named} are fewer than parallel.pipeline={stages} stages, most of which would idle; "
            f"set train.global_batch={train.micro_batch * replicas * stages} or more"
        )
    if run.parallel.virtual_pipeline == 1:
        return
    group = microbatch_group(run)
    valid = [g for g in range(stages, count + 1) if not 0 < count % g < stages]
    nearest = f"pipeline.microbatch_group={min(valid, key=lambda g: abs(g - group))}"
    if not stages <= group <= count:
        raise UserError(
            f"pipeline.microbatch_group={group} must lie between {stages} stages and {named}: set {nearest}"
        )
    if 0 < count % group < stages:
        raise UserError(
            f"{named} leave a last group of {count % group} after groups of pipeline.microbatch_group={group}; the "
            f"schedule wants none or at least parallel.pipeline={stages}: set train.global_batch="
            f"{train.micro_batch * replicas * (count - count % group)}, or {nearest}"
        )


def data_parallel(run: RunConfig, world_size: int) -> int:
    """Data-parallel ranks that `world_size` processes leave.

    Raises UserError where the layout does not divide the processes.
    """
    model_ranks = run.parallel.tensor * run.parallel.pipeline
    if world_size % model_ranks:
        raise UserError(
            f"{world_size} processes cannot hold parallel.tensor={run.parallel.tensor} x "
            f"parallel.pipeline={run.parallel.pipeline} = {model_ranks} ranks a model copy; start a multiple of "
            f"{model_ranks}"
        )
    return world_size // model_ranks


def microbatches(run: RunConfig, world_size: int) -> int:
    """Of a step and rank, where `check_run` has nothing to say against it."""
    return run.train.global_batch // (run.train.micro_batch * data_parallel(run, world_size))


def check_run(run: RunConfig, world_size: int) -> None:
    """Raise UserError for the first combination of settings that cannot run on `world_size` processes."""
    train, data = run.train, run.data
    _check_ranges(run)
    if not data.train:
        raise UserError("data.train names no corpus")
    for source in (*data.train, *data.valid):
        if not source.weight > 0:
            raise UserError(f"weight={source.weight} of corpus {source.prefix} must be above 0; leave it out instead")
    if train.eval_every and not data.valid and not data.valid_fraction:
        raise UserError("there is no validation data: set data.valid or data.valid_fraction, or train.eval_every=0")
    residual_of(run)
    check_layout(run)
    _check_sequence(run)
    replicas = data_parallel(run, world_size)
    if train.global_batch % (train.micro_batch * replicas):
        raise UserError(
            f"train.global_batch={train.global_batch} is not a multiple of train.micro_batch={train.micro_batch} x "
            f"{replicas} data-parallel ranks = {train.micro_batch * replicas}"
        )
    _check_schedule(run, replicas)


def _check_ranges(run: RunConfig) -> None:
    train, optimizer, checkpoint, log = run.train, run.optimizer, run.checkpoint, run.log
    positive("train", steps=train.steps, global_batch=train.global_batch, micro_batch=train.micro_batch)
    positive("train", spike_window=train.spike_window, stop_at=train.stop_at, eval_sequences=train.eval_sequences)
    not_negative("train", eval_every=train.eval_every, spike_factor=train.spike_factor)
    positive("optimizer", lr=optimizer.lr, eps=optimizer.eps)
    not_negative("optimizer", weight_decay=optimizer.weight_decay, clip_norm=optimizer.clip_norm)
    for name in ("min_lr_ratio", "warmup_fraction"):
        if not 0 <= (value := getattr(optimizer, name)) <= 1:
            raise UserError(f"optimizer.{name}={value} must lie between 0 and 1")
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(optimizer, name)) < 1:
            raise UserError(f"optimizer.{name}={value} must be at least 0 and below 1")
    if not 0 <= run.data.valid_fraction < 1:
        raise UserError(f"data.valid_fraction={run.data.valid_fraction} must be at least 0 and below 1")
    not_negative("data", workers=run.data.workers)
    not_negative("checkpoint", every=checkpoint.every, keep=checkpoint.keep)
    positive("log", every=log.every, peak_tflops=log.peak_tflops)
    not_negative("log", layer_stats_every=log.layer_stats_every)
    steps = run.profile.steps
    if steps and steps[0] > train.steps:
        raise UserError(f"profile.steps={steps} begin after the last step, train.steps={train.steps}")
    if steps is not None and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        raise UserError(
            f"profile.steps={steps} must be the first and the last step to record, counted from 1: [10, 12]"
        )


def check_layout(run: RunConfig) -> None:
    """Raise UserError where the model does not divide as `parallel` and `pipeline` say."""
    model, parallel = run.model, run.parallel
    positive("parallel", tensor=parallel.tensor, pipeline=parallel.pipeline, virtual_pipeline=parallel.virtual_pipeline)
    positive("parallel", bucket_size=parallel.bucket_size)
    if parallel.context != 1:
        raise UserError(
            f"parallel.context={parallel.context}: context parallelism is not supported. A residual architecture is "
            "token-wise and would allow it, but causal attention over a divided sequence (and MoDA's joint softmax) "
            "needs ring attention that this backbone does not have; use parallel.tensor with parallel.sequence"
        )
    layout_of(run)
    for name, count in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_kv_heads", model.kv_heads),
        ("ffn_hidden_size", model.ffn_hidden_size),
    ):
        if count % parallel.tensor:
            raise UserError(f"model.{name}={count} is not divisible by parallel.tensor={parallel.tensor}")
    if parallel.overlap_param_gather and not (parallel.distributed_optimizer and parallel.overlap_grad_reduce):
        raise UserError(
            "parallel.overlap_param_gather=true needs parallel.distributed_optimizer=true (it is "
            f"{str(parallel.distributed_optimizer).lower()}) and parallel.overlap_grad_reduce=true (it is "
            f"{str(parallel.overlap_grad_reduce).lower()})"
        )
    if run.train.precision in (Precision.FP64, Precision.REFERENCE) and parallel.distributed_optimizer:
        raise UserError(
            f"train.precision={run.train.precision.value} needs parallel.distributed_optimizer=false: Megatron-Core's "
            "keeps float32 master weights"
        )


def _check_sequence(run: RunConfig) -> None:
    model, parallel = run.model, run.parallel
    if parallel.sequence and model.sequence_length % parallel.tensor:
        raise UserError(
            f"model.sequence_length={model.sequence_length} is not divisible by parallel.tensor={parallel.tensor}, "
            "as parallel.sequence needs"
        )
