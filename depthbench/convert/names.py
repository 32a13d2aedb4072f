"""From a checkpoint's logical tensors to an export's: names, shapes, types."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from depthbench.config.schema import RunConfig
from depthbench.errors import UserError
from depthbench.model.config import ModelConfig
from depthbench.residual import Residual

from .reading import Weights

_BACKBONE = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Exported:
    """One tensor. logical: its name in the checkpoint; name: in the export."""

    logical: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def is_llama(run: RunConfig, residual: Residual) -> bool:
    """Whether transformers' own Llama computes the same function. It refuses a width that heads do not divide."""
    return residual.llama_names is not None and run.model.hidden_size % run.model.num_attention_heads == 0


def exported_tensors(run: RunConfig, residual: Residual, dtype: torch.dtype) -> list[Exported]:
    """What an export of the run holds, in depth order, stored as `dtype`; in float32 what training keeps there."""
    return named_tensors(run.model, residual, dtype, is_llama(run, residual))


def named_tensors(model: ModelConfig, residual: Residual, dtype: torch.dtype, llama: bool) -> list[Exported]:
    """A model's tensors as `exported_tensors`. llama: under the names of transformers' own Llama."""
    own = (residual.llama_names or {}) if llama else {}
    size = model.head_size
    width, inner = model.hidden_size, model.ffn_hidden_size
    heads, kv_heads = model.num_attention_heads * size, model.kv_heads * size
    shapes = {
        "attention.q": (heads, width),
        "attention.k": (kv_heads, width),
        "attention.v": (kv_heads, width),
        "attention.out": (width, heads),
        "mlp.gate": (inner, width),
        "mlp.up": (inner, width),
        "mlp.down": (width, inner),
    }

    def of_residual(logical: str, name: str, local: str, module: nn.Module) -> Iterator[Exported]:
        for path, parameter in module.named_parameters():
            path = f"{local}.{path}"
            yield Exported(logical + path, name + own.get(path, path), tuple(parameter.shape), parameter.dtype)

    found = [Exported("embedding.weight", "model.embed_tokens.weight", (model.vocab_size, width), dtype)]
    with torch.device("meta"):
        for block in range(model.num_layers):
            logical, name = f"blocks.{block}.", f"model.layers.{block}."
            for local, shape in shapes.items():
                found.append(Exported(f"{logical}{local}.weight", f"{name}{_BACKBONE[local]}.weight", shape, dtype))
            for extra, rows in residual.extra_projections(block):
                found.append(
                    Exported(f"{logical}mlp.{extra}.weight", f"{name}mlp.extra.{extra}.weight", (rows, width), dtype)
                )
            found += of_residual(logical, name, "attention_residual", residual.connection(2 * block, dtype))
            found += of_residual(logical, name, "mlp_residual", residual.connection(2 * block + 1, dtype))
        found += of_residual("", "model.", "readout", residual.readout(dtype))
    if not model.tie_embeddings:
        found.append(Exported("head.weight", "lm_head.weight", (model.vocab_size, width), dtype))
    return found


def tensor_faults(
    stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], makes: str
) -> list[str]:
    """How stored tensors' shapes differ from those wanted. makes: what makes these so, as `config.json makes`."""
    return [
        *(f"{name} is missing" for name in wanted if name not in stored),
        *(f"{name} belongs to no part of the model" for name in sorted(stored.keys() - wanted.keys())),
        *(
            f"{name} has shape {stored[name]}, {makes} it {shape}"
            for name, shape in wanted.items()
            if stored.get(name, shape) != shape
        ),
    ]


def listed(faults: Sequence[str], most: int = 8) -> str:
    """The first of them, and how many more there are."""
    return "; ".join(faults[:most]) + (f"; and {len(faults) - most} more" if len(faults) > most else "")


def check(weights: Weights, wanted: list[Exported]) -> None:
    """Raise UserError naming tensors that the checkpoint lacks, has besides, or has in another shape."""
    needed = {tensor.logical: tensor.shape or (1,) for tensor in wanted}
    if faults := tensor_faults(weights.shapes, needed, "the settings make"):
        raise UserError(
            f"checkpoint {weights.checkpoint.path} does not fit the settings in its own manifest.json "
            f"({weights.run.architecture}, {weights.run.model.num_layers} blocks): {listed(sorted(faults), 5)}"
        )
