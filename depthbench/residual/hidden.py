"""What architectures share whose live state is one hidden vector `h`."""

import torch
from torch import Tensor, nn

from .norms import RMSNorm
from .state import DepthState


class HiddenReadout(nn.Module):
    """norm(h), the input of the LM head."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps, dtype)

    def forward(self, state: DepthState) -> Tensor:
        return self.norm(state.live["h"])
