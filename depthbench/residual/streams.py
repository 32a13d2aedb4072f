"""What architectures share whose state is n residual streams, live; `config.num_streams` is n."""

import math
from typing import Any

from torch import Tensor

from .protocol import Residual, Shape
from .state import DepthState, StateSpec, TensorSpec


class StreamResidual(Residual):
    """State: live `streams` [S, B, N, D], all copies of the embedding at first."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__(config, shape)
        if config.num_streams < 1:
            raise ValueError(f"residual.num_streams={config.num_streams} must be at least 1")

    def start(self, embedding: Tensor) -> DepthState:
        return DepthState({"streams": embedding.unsqueeze(-2).repeat_interleave(self.config.num_streams, -2)}, {})

    def state_at(self, sublayer: int) -> StateSpec:
        return StateSpec((TensorSpec("streams", (self.config.num_streams, self.shape.hidden_size)),), ())

    def probe(self, state: DepthState) -> Tensor:
        return state.live["streams"]

    def init_scale(self, projection: str) -> float:
        """What a branch writes reaches the readout n times."""
        return 1 / math.sqrt(self.config.num_streams) if projection in ("out", "down") else 1.0
