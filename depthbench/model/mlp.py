"""SwiGLU MLP: down(silu(gate x) * up x), bias-free, with room for the architecture's extra projections of x.

Shapes: S sequence, B microbatch, D hidden, F this rank's share of the inner width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from depthbench.parallel.context import ParallelContext
from depthbench.residual import Residual
from depthbench.residual.parameters import Part, truncated_normal

from .config import ModelConfig
from .linear import column_linear, row_linear


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, residual: Residual, block: int, context: ParallelContext) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.ffn_hidden_size
        extra = residual.extra_projections(block)

        def part(name: str, shape: tuple[int, int]) -> Part:
            return Part(name, shape, truncated_normal(config.init_std * residual.init_scale(name)))

        rows = {"gate": inner, "up": inner, **{projection.name: projection.rows for projection in extra}}
        parts = [part(name, (count, width)) for name, count in rows.items()]
        self.extra_names = [projection.name for projection in extra]
        self.part_rows = [part.shape[0] // context.tp_size for part in parts]
        self.gate_up = column_linear(parts, context)
        self.down = row_linear(part("down", (width, inner)), context)

    def forward(self, x_SBD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the branch output and, by name, the extra projections [S, B, rows / TP]."""
        gate_up, _ = self.gate_up(x_SBD)
        gate_SBF, up_SBF, *extra = gate_up.split(self.part_rows, -1)
        y, _ = self.down(F.silu(gate_SBF) * up_SBF)
        return y, dict(zip(self.extra_names, extra, strict=True))
