"""Per-block statistics of the depth state and its gradient, on the steps that ask for them.

For each block's newest representation: mean, variance, mean |x| and the root-mean-square norm of a token's vector,
forward and backward. With several streams a token counts once per stream.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from depthbench.model.stage import DecoderStage

_NAMES = ("mean", "variance", "mean_abs", "norm")


class LayerStats:
    """Collects while installed on a rank's stages; costs nothing otherwise."""

    def __init__(self, stages: Sequence[DecoderStage]) -> None:
        self.stages = stages
        # [direction, block, (sum, sum of squares, sum of |x|, elements, vectors)]
        self.sums = torch.zeros(
            2, stages[0].span.num_layers, 5, dtype=torch.float64, device=torch.cuda.current_device()
        )

    def __enter__(self) -> "LayerStats":
        for stage in self.stages:
            stage.block_hook = self._hook
        return self

    def __exit__(self, *exception: object) -> None:
        for stage in self.stages:
            stage.block_hook = None

    def _hook(self, block: int, x: Tensor) -> None:
        self._add(0, block, x)
        if x.requires_grad:
            x.register_hook(lambda grad: self._add(1, block, grad))

    def _add(self, direction: int, block: int, x: Tensor) -> None:
        x = x.detach()
        absolute, norm = (torch.linalg.vector_norm(x, order, dtype=torch.float64) for order in (1, 2))
        sums = torch.stack([x.sum(dtype=torch.float64), norm.square(), absolute])
        self.sums[direction, block, :3] += sums
        self.sums[direction, block, 3] += x.numel()
        self.sums[direction, block, 4] += x.numel() // x.shape[-1]

    def collect(self, tokens: int) -> dict[str, float]:
        """`layer_stats/block_07/forward/norm`: value, over the global batch. Gradients are those of the mean loss.

        tokens: of the global batch, by which the summed loss's gradients are divided. A collective call.
        """
        context = self.stages[0].context
        dist.all_reduce(self.sums, group=context.dp_group)
        dist.all_reduce(self.sums, group=context.pp_group)
        if context.sequence_parallel:
            dist.all_reduce(self.sums, group=context.tp_group)
        result = {}
        for direction, label, scale in ((0, "forward", 1.0), (1, "backward", 1.0 / max(tokens, 1))):
            for block, (total, squares, absolute, elements, vectors) in enumerate(self.sums[direction].tolist()):
                if not elements:
                    continue
                mean = total / elements
                values = (
                    mean * scale,
                    (squares / elements - mean**2) * scale**2,
                    absolute / elements * scale,
                    (squares / vectors) ** 0.5 * scale,
                )
                for name, value in zip(_NAMES, values, strict=True):
                    result[f"layer_stats/block_{block:02d}/{label}/{name}"] = value
        return result
