"""What architectures share whose state is n residual streams, live; `config.num_streams` is n."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .norms import RMSNorm
from .olmo import OlmoSetting
from .protocol import Residual, Shape
from .state import DepthState, StateSpec, TensorSpec

BRANCHES = {"attention": "attention", "mlp": "feed_forward"}  # ours and DepthBench's


def olmo_names(parameters: Mapping[str, str]) -> dict[str, str]:
    """Of both connections' parameters, ours -> theirs."""
    return {
        f"{ours}_residual.{name}": f"{theirs}_hyper_connection.{parameters[name]}"
        for ours, theirs in BRANCHES.items()
        for name in parameters
    }


# there a connection holds its branch, which the block holds too
OLMO_ALIASES = {
    f"{branch}_hyper_connection.branch.{inner}.": f"{outer}."
    for branch in BRANCHES.values()
    for inner, outer in (("norm", f"{branch}_norm"), (branch, branch))
}
OLMO_STREAMS = OlmoSetting("hyper_connections.num_residual_streams", 4)
OLMO_CLASS = ("olmo_core.nn.transformer.config.HyperConnectionsConfig", None)
OLMO_FREE = frozenset(
    f"hyper_connections.{key}"
    for key in (
        "gating_factor_init",
        "disable_static_weight_decay",
        "scale_output_init_by_sqrt_n",
        "sinkhorn_tau",
        "liger_phi_dtype",
        "liger_allow_fp32",
    )
)


def readout_norm(width: int, config: Any, dtype: torch.dtype) -> RMSNorm:
    """Of the readout: it has an eps of its own where the settings give one."""
    return RMSNorm(width, config.norm_eps if config.readout_norm_eps is None else config.readout_norm_eps, dtype)


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
