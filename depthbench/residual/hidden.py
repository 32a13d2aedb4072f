"""What architectures share whose live state is one hidden vector `h`."""

import torch
from torch import Tensor, nn

from .norms import RMSNorm
from .protocol import Cost, Residual
from .state import DepthState, StateSpec, TensorSpec


class HiddenReadout(nn.Module):
    """norm(h), the input of the LM head."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(width, eps, dtype)

    def forward(self, state: DepthState) -> Tensor:
        return self.norm(state.live["h"])


class HiddenResidual(Residual):
    """Base of such architectures: no history, one norm of width D a sublayer and a final one, all with the eps
    `config.norm_eps`. A subclass overrides what differs."""

    def start(self, embedding: Tensor) -> DepthState:
        return DepthState({"h": embedding}, {})

    def readout(self, dtype: torch.dtype) -> nn.Module:
        return HiddenReadout(self.shape.hidden_size, self.config.norm_eps, dtype)

    def state_at(self, sublayer: int) -> StateSpec:
        return StateSpec((TensorSpec("h", (self.shape.hidden_size,)),), ())

    def num_parameters(self) -> int:
        return (self.shape.num_sublayers + 1) * self.shape.hidden_size

    def flops_per_token(self) -> Cost:
        return Cost(0, 0)

    def probe(self, state: DepthState) -> Tensor:
        return state.live["h"]
