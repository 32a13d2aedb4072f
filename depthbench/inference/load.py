"""From a checkpoint, or a run's own initial weights, to this rank's part of a model that reads and writes.

The layout is the reader's own: what the model was trained on does not matter. Unless told otherwise it is one process,
and ranks that share matmuls share tokens too.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from depthbench.config.load import group_file, load_settings, merge, parse_overrides, plain, read_yaml, typed
from depthbench.config.schema import RunConfig
from depthbench.config.validate import check_layout, check_pipeline, microbatch_group, residual_of
from depthbench.convert.reading import Weights
from depthbench.errors import UserError
from depthbench.model.build import build_stages
from depthbench.model.init import generator_for
from depthbench.model.stage import DecoderStage
from depthbench.parallel import startup
from depthbench.parallel.placement import logical_shards, spec_of
from depthbench.pipeline.build import make_transport
from depthbench.pipeline.transport import Transport

from .engine import Engine

_FREE = ("rope_scaling", "sequence_length")  # of `model`: no weight depends on them


@dataclass(frozen=True)
class Source:
    """weights: None for a run's own initial ones."""

    run: RunConfig
    weights: Weights | None

    @property
    def name(self) -> str:
        return str(self.weights.checkpoint.path) if self.weights else f"{self.run.name}, no trained weights"


@dataclass(frozen=True)
class Loaded:
    """This rank's part of a model."""

    run: RunConfig
    stages: list[DecoderStage]
    transport: Transport | None

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for stage in self.stages for parameter in stage.parameters())

    def engine(self, batch: int, capacity: int, page: int | None = None, most_ahead: int | None = None) -> Engine:
        return Engine(self.stages, self.transport, batch, capacity, page, most_ahead)


def _layout(words: list[str]) -> dict[str, dict[str, Any]]:
    """The sections of the layout, from overrides alone."""
    chosen, given = parse_overrides(words)
    parallel: dict[str, Any] = {"sequence": True}
    if "parallel" in chosen:
        parallel = merge(parallel, read_yaml(group_file("parallel", chosen["parallel"])))
    parallel = merge(parallel, given.get("parallel", {}))
    # nothing is trained: no optimizer (a run in float64 has to say so), and no checkpoint ends a group of depth reads
    parallel |= {"distributed_optimizer": False, "recompute": "none"}
    return {"parallel": parallel, "pipeline": given.get("pipeline", {})}


def find_source(name: str, words: list[str], processes: int | None) -> Source:
    """A checkpoint (its folder, or a run's for its newest), or a run (a YAML file, or a name under configs/runs/) with
    the weights it would start from. processes: None where none will read it.

    Raises UserError for anything that cannot be read, for overrides that a checkpoint's weights do not allow, and where
    the model cannot be laid out on so many processes, each with a part of it.
    """
    source = _find(name, words)
    _check(source.run, processes)
    return source


def _find(name: str, words: list[str]) -> Source:
    if not Path(name).is_dir():
        return Source(typed({**load_settings(name, words), **_layout(words)}), None)
    weights = Weights(Path(name))
    chosen, given = parse_overrides(words)
    settings = plain(weights.run)
    for group in ("model", "residual", "data"):
        if group in chosen:
            settings[group] = read_yaml(group_file(group, chosen[group]))
    run = typed({**merge(settings, given), **_layout(words)})
    _check_same_model(run, weights)
    return Source(run, weights)


def _check_same_model(run: RunConfig, weights: Weights) -> None:
    """Raise UserError where `run` would give the checkpoint's weights to another model."""
    trained, where = weights.run, weights.checkpoint.path
    if run.architecture != trained.architecture:
        raise UserError(
            f"checkpoint {where} was trained with residual.architecture={trained.architecture}: its weights make no "
            f"{run.architecture} model; leave the residual section out"
        )
    for section in ("model", "residual"):
        asked, had = (dataclasses.asdict(getattr(each, section)) for each in (run, trained))
        for key, value in asked.items():
            if value != had[key] and not (section == "model" and key in _FREE):
                raise UserError(
                    f"{section}.{key}={value}: checkpoint {where} was trained with {had[key]}; leave it out"
                )


def _check(run: RunConfig, processes: int | None) -> None:
    """Raise UserError where the model cannot be laid out, on so many, each with a part of it, or could not be read."""
    residual_of(run)
    check_layout(run)
    check_pipeline(run)
    tensor, pipeline = run.parallel.tensor, run.parallel.pipeline
    if (group := microbatch_group(run)) != pipeline:
        raise UserError(
            f"pipeline.microbatch_group={group} is for training: reading sends pieces of a text through in groups of "
            f"parallel.pipeline={pipeline}, as in larger ones stages would wait for each other; leave it out"
        )
    if processes not in (None, tensor * pipeline):
        raise UserError(
            f"{processes} processes for parallel.tensor={tensor} x parallel.pipeline={pipeline}: there is one copy of "
            f"the model, so start {tensor * pipeline}"
        )


def load(source: Source, *, quick: bool = False) -> Loaded:
    """A collective call of all processes, which joins them.

    Args:
        source: one that can be laid out on them.
        quick: without a checkpoint, matmuls' weights are any random numbers, drawn where they lie: a large model's
            initial ones take minutes, and speed does not depend on them.

    Raises UserError where the checkpoint lacks a weight.
    """
    run = source.run
    context = startup.start(run)
    transport = make_transport(run, context)
    stages = build_stages(run, context, transport, draw=source.weights is None and not quick)
    if source.weights:
        _fill(stages, source.weights)
    stages = [stage.to(torch.cuda.current_device()) for stage in stages]
    if quick and not source.weights:
        _draw(run, stages)
    return Loaded(run, stages, transport)


@torch.no_grad()
def _draw(run: RunConfig, stages: Sequence[DecoderStage]) -> None:
    for stage in stages:
        for name, parameter in stage.named_parameters():
            spec = spec_of(name, parameter)
            if spec.shard_axis is not None:
                parameter.normal_(std=run.model.init_std)
            else:  # few, and alike on all ranks
                (part,) = spec.parts
                parameter.copy_(part.init(part.shape, generator_for(run.seed, name)))


@torch.no_grad()
def _fill(stages: Sequence[DecoderStage], weights: Weights) -> None:
    for stage in stages:
        for name, parameter in stage.named_parameters():
            for shard in logical_shards(name, parameter, stage.context.tp_rank, stage.context.tp_size):
                shape, stored = shard.part.shape, weights.shapes.get(shard.name)
                if stored != (shape or (1,)):
                    has = f"has {shard.name} of shape {stored}" if stored else f"has no {shard.name}"
                    raise UserError(f"checkpoint {weights.checkpoint.path} {has}; the model needs {shape}")
                whole = weights.read(shard.name, shape, weights.dtypes[shard.name])
                parameter[shard.local] = whole[shard.glob].to(parameter)
