"""Small models under every layout, and the naive references' weights in them."""

from typing import Any

import torch
from torch import Tensor

from depthbench.config.load import typed
from depthbench.config.schema import RunConfig
from depthbench.model.build import build_stage, build_stages
from depthbench.model.stage import DecoderStage
from depthbench.parallel import startup
from depthbench.parallel.placement import logical_shards
from depthbench.pipeline.build import make_transport
from depthbench.training.wrapped import WrappedModel, wrap
from tests.harness import join_world
from tests.reference import Shape

Weights = dict[str, Tensor]

# architecture, its settings here, the reference's options
ARCHITECTURES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("pre_ln", {}, {}),
    ("sandwich_ln", {}, {}),
    ("lns", {}, {}),
    ("deepnorm", {}, {}),
    ("keel", {}, {}),
    ("block_attnres", {"sublayers_per_block": 1}, {"sublayers_per_block": 1}),  # Full AttnRes
    ("block_attnres", {"sublayers_per_block": 3}, {"sublayers_per_block": 3}),
    ("hc", {}, {}),
    ("mhc", {}, {}),
    ("moda", {}, {}),
]


def small_run(architecture: str, residual: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """Four layers, grouped queries, a vocabulary that divides by nothing; float64 with a plain optimizer."""
    base: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 4,
            "hidden_size": 48,
            "ffn_hidden_size": 80,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "vocab_size": 150,
            "sequence_length": 16,
        },
        "parallel": {"distributed_optimizer": False},
        "data": {"train": [{"prefix": "none"}], "tokenizer": "none"},
        "optimizer": {"lr": 1e-3},
        "train": {"steps": 5, "global_batch": 4, "micro_batch": 2, "precision": "fp64"},
    }
    settings: dict[str, Any] = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base}
    settings |= {name: sections.get(name, {}) for name in ("pipeline", "checkpoint", "log")}
    return typed({"name": "small", **settings, "residual": {"architecture": architecture, **(residual or {})}})


def reference_shape(run: RunConfig) -> Shape:
    model = run.model
    return Shape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_size,
        vocab_size=model.vocab_size,
        rope_theta=model.rope_theta,
        tied=model.tie_embeddings,
    )


def reference_name(name: str) -> str:
    """The references' name of one of our logical tensors."""
    name = name.replace("depth_read.query", "query").replace("depth_read.key_norm", "key_norm.weight")
    return name.replace("mlp.depth_", "mlp_residual.depth_")


def start_stage(rank: int, world_size: int, store: str, run: RunConfig) -> DecoderStage:
    join_world(rank, world_size, store)
    return build_stage(run, startup.start(run))


def start_model(rank: int, world_size: int, store: str, run: RunConfig) -> WrappedModel:
    """This rank's chunks as the trainer builds and wraps them."""
    join_world(rank, world_size, store)
    context = startup.start(run)
    transport = make_transport(run, context)
    return wrap(run, build_stages(run, context, transport), transport)


@torch.no_grad()
def load_weights(stage: DecoderStage, weights: Weights) -> None:
    """Put a reference's weights into a stage of any layout; `assemble` sees whether each found its place."""
    for name, parameter in stage.named_parameters():
        for shard in logical_shards(name, parameter, stage.context.tp_rank, stage.context.tp_size):
            parameter[shard.local] = weights[reference_name(shard.name)][shard.glob].to(parameter)


def load_model(model: WrappedModel, weights: Weights) -> None:
    for stage in model.stages:
        load_weights(stage, weights)


Pieces = dict[str, tuple[tuple[slice, ...], tuple[int, ...], Tensor]]
"""Logical name -> (place in the logical tensor, its shape, this rank's values)."""


def pieces(stage: DecoderStage, values: str = "grad") -> Pieces:
    """This rank's share of each logical tensor of the parameters or of an attribute of theirs."""
    found: Pieces = {}
    for name, parameter in stage.named_parameters():
        tensor = parameter.detach() if values == "data" else getattr(parameter, values)
        if tensor is None:
            tensor = torch.zeros_like(parameter)
        for shard in logical_shards(name, parameter, stage.context.tp_rank, stage.context.tp_size):
            place = (shard.glob, shard.part.shape, tensor[shard.local].detach().clone())
            found[reference_name(shard.name)] = place
    return found


def model_pieces(model: WrappedModel, values: str = "grad") -> Pieces:
    """Those of all chunks of this rank."""
    return {name: piece for stage in model.stages for name, piece in pieces(stage, values).items()}


def assemble(ranks: list[Pieces]) -> Weights:
    """Whole logical tensors from the ranks' pieces; where ranks overlap they must agree bit by bit."""
    whole: Weights = {}
    filled: dict[str, Tensor] = {}
    for found in ranks:
        for name, (glob, shape, values) in found.items():
            tensor = whole.setdefault(name, torch.zeros(shape, dtype=values.dtype))
            mask = filled.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            known = mask[glob]
            assert torch.equal(tensor[glob][known], values[known]), f"copies of {name} differ between ranks"
            tensor[glob] = values
            mask[glob] = True
    assert all(bool(mask.all()) for mask in filled.values()), "a logical tensor has a hole"
    return whole


def assert_close(ours: Weights, theirs: Weights, tolerance: float, floor: float = 1e-5) -> None:
    """Every tensor within `tolerance` of its own largest element, or of `floor` of the largest of all: some gradients
    nearly cancel by design (mHC's mixing before the readout), and all their digits are rounding."""
    assert set(ours) == set(theirs), f"names differ: {sorted(set(ours) ^ set(theirs))}"
    floor *= max(expected.abs().max().item() for expected in theirs.values())
    for name, expected in theirs.items():
        error = (ours[name] - expected).abs().max().item()
        scale = max(expected.abs().max().item(), floor)
        assert error <= tolerance * scale, f"{name}: relative error {error / scale:.2e}"
