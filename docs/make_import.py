"""Rewrites the table of docs/import.md: what becomes of a Pre-LN model, architecture by architecture, and how far off.

python docs/make_import.py        # takes about a minute on a CPU

The model is random: 24 blocks of width 128, weights as a run draws them but for the norms', an eps of 1e-5. Logits are
the trainer's, in float32, at 256 random tokens; a difference is the largest, over Pre-LN's largest logit.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from depthbench.config.load import typed
from depthbench.convert.huggingface import plain_llama
from depthbench.convert.names import named_tensors
from depthbench.convert.source import Source
from depthbench.convert.trainers_model import run_trainers_model
from depthbench.convert.upcycle import Upcycled, upcycled
from depthbench.model.config import ModelConfig
from depthbench.model.init import generator_for
from depthbench.paths import CONFIGS
from depthbench.residual.parameters import truncated_normal

if TYPE_CHECKING:
    from docs.make_reference import replaced
else:  # as a script, this folder is on the path
    from make_reference import replaced

PAGE = Path(__file__).with_name("import.md")
BEGIN = "<!-- begin generated: python docs/make_import.py -->"
EPS = 1e-5
MODEL = ModelConfig(24, 128, 352, 8, 512, sequence_length=128, num_kv_heads=4)


class Random:
    """A `Source` of random Pre-LN weights."""

    tokenizer: Path | None = None
    model, architecture = MODEL, plain_llama().name

    def __init__(self) -> None:
        self.residual = plain_llama().Config(norm_eps=EPS)
        described = plain_llama()(self.residual, MODEL.residual_shape)
        tensors = named_tensors(MODEL, described, torch.float32, llama=False)
        self.shapes = {tensor.logical: tensor.shape for tensor in tensors}
        self.dtypes: Mapping[str, torch.dtype] = {tensor.logical: tensor.dtype for tensor in tensors}
        self.origin: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        drawn = truncated_normal(0.02)(self.shapes[name], generator_for(0, name))
        return 1 + 10 * drawn if len(drawn.shape) == 1 else drawn


def logits(source: Source) -> Tensor:
    run = typed(
        {
            "name": "none",
            "model": asdict(source.model),
            "residual": {"architecture": source.architecture, **asdict(source.residual)},
            "data": {"train": [], "tokenizer": "none"},
            "optimizer": {"lr": 0.0},
            "train": {"steps": 0, "global_batch": 0, "micro_batch": 0},
        }
    )
    tokens_BS = torch.randint(MODEL.vocab_size, (2, 128), generator=torch.Generator().manual_seed(0))
    return run_trainers_model(run, lambda n, shape: source.read(n).reshape(shape), tokens_BS, torch.float32).logits


def own_eps(made: Upcycled) -> list[str]:
    """`--set` words that leave every eps as the architecture has it."""
    defaults = {field.name: field.default for field in fields(made.residual)}
    changed = {name for name, value in asdict(made.residual).items() if value != defaults[name]}
    values = {name: defaults[name] for name in changed if "eps" in name}
    return [f"{name}={'null' if value is None else value}" for name, value in values.items()]


def table() -> str:
    source = Random()
    expected = logits(source)

    def difference(made: Upcycled) -> str:
        return f"{float((logits(made) - expected).abs().max() / expected.abs().max()):.0e}"

    lines = ["| `--residual` | function | logits differ by | with the architecture's own eps |", "|---|---|---|---|"]
    for path in sorted((CONFIGS / "residual").glob("*.yaml")):
        made = upcycled(source, path.stem, [], allow_different=True)
        words = own_eps(made)
        other = difference(upcycled(source, path.stem, words, allow_different=True)) if words else ""
        function = f"another: {made.different}" if made.different else "the same"
        lines.append(f"| `{path.stem}` | {function} | {difference(made)} | {'' if made.different else other} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, table(), PAGE.name))
