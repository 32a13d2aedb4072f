"""Checkpoints to export, of weights far from their initial values, and what the trainer's model says of them."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing
from torch import Tensor, nn

from depthbench import cli
from depthbench.checkpoint.folder import find
from depthbench.checkpoint.store import CheckpointWriter
from depthbench.checkpoint.tensors import model_tensors
from depthbench.config.load import plain, typed
from depthbench.config.schema import RunConfig
from depthbench.model import build
from depthbench.model.init import generator_for
from depthbench.parallel import startup
from depthbench.parallel.context import ParallelContext
from depthbench.parallel.placement import logical_shards
from depthbench.pipeline.build import make_transport
from depthbench.training.trainer import train
from tests.corpora import VOCAB, Corpus, trainable_run
from tests.harness import defer_world, join_world, run_workers

MODEL = {"num_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": VOCAB + 3}


@dataclass(frozen=True)
class Case:
    """How one architecture is trained: its settings, the backbone's beside `MODEL`, the layout and its processes."""

    residual: dict[str, Any]
    model: dict[str, Any]
    parallel: dict[str, Any]
    processes: int = 1


def case(architecture: str, processes: int = 1, parallel: dict[str, Any] | None = None, **model: Any) -> Case:
    settings = {"residual": {"architecture": architecture, **model.pop("residual", {})}}
    return Case(settings["residual"], model, parallel or {}, processes)


YARN = {"kind": "yarn", "factor": 4.0, "original_sequence_length": 16}
CASES = {
    "pre_ln": case("pre_ln", rope_theta=500.0),
    "sandwich_ln": case("sandwich_ln", tie_embeddings=True),
    "lns": case("lns", head_dim=76),
    "deepnorm": case("deepnorm", rope_scaling=YARN),
    "keel": case("keel", rope_theta=500.0, head_dim=94),
    "full_attnres": case("block_attnres", residual={"sublayers_per_block": 1}),
    "block_attnres": case(
        "block_attnres",
        processes=2,
        parallel={"pipeline": 2, "virtual_pipeline": 2},
        residual={"sublayers_per_block": 3},
        num_layers=4,
        tie_embeddings=True,
    ),
    "hc": case("hc"),
    "mhc": case("mhc"),
    "moda": case("moda", processes=4, parallel={"tensor": 2, "sequence": True, "pipeline": 2}, num_layers=4),
}

# for those that are trained: tensor and pipeline parallel, some with sequence parallelism, one interleaved
TP2_PP2 = {"tensor": 2, "pipeline": 2}
FURTHER: dict[str, dict[str, Any]] = {
    **{name: {"sequence": True} for name in ("lns", "full_attnres", "hc", "moda")},
    "block_attnres": {"virtual_pipeline": 2},
}
TRAINED = {
    name: Case(case.residual, {**case.model, "num_layers": 4}, {**TP2_PP2, **FURTHER.get(name, {})}, 4)
    for name, case in CASES.items()
}


def run_of(corpus: Corpus, folder: Path, case: Case, **train: Any) -> RunConfig:
    return trainable_run(
        corpus,
        folder,
        model={**MODEL, **case.model},
        residual=case.residual,
        parallel=case.parallel,
        train={"steps": 3, "eval_every": 3, **train},
        checkpoint={"every": 0},
    )


def shaken(rank: int = 0) -> None:
    """Let models start from weights at which most mistakes show, the same under every layout."""
    initialize = build.initialize

    @torch.no_grad()
    def random(model: nn.Module, seed: int, context: ParallelContext) -> None:
        initialize(model, seed, context)
        for name, parameter in model.named_parameters():
            for shard in logical_shards(name, parameter, context.tp_rank, context.tp_size):
                noise = torch.randn(shard.part.shape, generator=generator_for(1, shard.name)) * 0.1
                parameter[shard.local] += noise[shard.glob].to(parameter)

    build.initialize = random


def _train(rank: int, world_size: int, store: str, runs: list[RunConfig]) -> list[int]:
    defer_world(rank, world_size, store)
    shaken()
    return [train(run) for run in runs]


def trained(runs: list[RunConfig], processes: int) -> None:
    """Trains one run after the other in the same processes: starting them takes longer than three steps."""
    assert run_workers(processes, _train, runs) == [[0] * len(runs)] * processes


def _save(
    rank: int, world_size: int, store: str, runs: list[RunConfig], change: Callable[[str, Tensor], None] | None
) -> None:
    defer_world(rank, world_size, store)
    shaken()
    for run in runs:
        context = startup.start(run)
        tensors = model_tensors(build.build_stages(run, context, make_transport(run, context)))
        for tensor in tensors if change else []:
            assert change
            change(tensor.key, tensor.data)
        writer = CheckpointWriter(Path(run.folder) / "checkpoints", run.checkpoint, lambda line: None)
        manifest = {"step": 1, "consumed_samples": 4, "architecture": run.architecture, "settings": plain(run)}
        writer.save(1, tensors, manifest)
        writer.close()
        startup.stop()


def saved(run: RunConfig, processes: int = 1, change: Callable[[str, Tensor], None] | None = None) -> Path:
    """A checkpoint of a model that was never trained; `change` may edit its tensors. Returns the run folder."""
    run_workers(processes, _save, [run], change)
    return Path(run.folder)


def all_saved(runs: list[RunConfig], processes: int = 1) -> None:
    run_workers(processes, _save, runs, None)


class Said(NamedTuple):
    """What the command returned and printed."""

    code: int
    out: str
    err: str


def _command(rank: int, world_size: int, store: str, words: list[str], before: Callable[[], None] | None) -> Said:
    if before:
        before()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["convert", "export", *words])
    return Said(code, out.getvalue(), err.getvalue())


def export(source: Path, out: Path, *options: str, before: Callable[[], None] | None = None) -> Said:
    """`depthbench convert export` in a process of its own; `before` may tamper with it."""
    (said,) = run_workers(1, _command, [str(source), str(out), *options], before)
    return said


@torch.no_grad()
def _run(rank: int, world_size: int, store: str, folder: Path, tokens_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    join_world(rank, world_size, store)
    checkpoint = find(folder)
    settings = checkpoint.manifest()["settings"]
    run = typed({**settings, "parallel": {"distributed_optimizer": False}})
    stage = build.build_stage(run, startup.start(run), draw=False)
    state = {f"{tensor.key}@{n}": tensor for n, tensor in enumerate(model_tensors([stage]))}
    targets = {name: tensor.data for name, tensor in state.items()}
    for name, values in dist_checkpointing.load(state, str(checkpoint.path)).items():
        targets[name].copy_(values.view(targets[name].shape))
    embedded = stage.embed(tokens_BS)
    depth, states = stage.residual.start(embedded), [embedded]
    for block in stage.blocks.values():
        depth = block(depth)
        states.append(stage.residual.probe(depth))
    logits = stage.logits(depth)[..., : run.model.vocab_size]
    return logits.transpose(0, 1), [state.transpose(0, 1) for state in states]


def megatron(folder: Path, tokens_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Of the trainer's model on one process, loaded by Megatron-Core's own reader: logits [B, S, V], the embedding and
    what each block leaves, [B, S, D] or, of residual streams, [B, S, N, D]."""
    (found,) = run_workers(1, _run, folder, tokens_BS)
    logits, states = found
    return logits, states


def megatron_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    """[B, S, V] as `megatron`."""
    return megatron(folder, tokens_BS)[0]
