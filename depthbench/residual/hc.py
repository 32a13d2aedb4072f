"""Dynamic Hyper-Connections: n residual streams, mixed by weights that depend on the token.

With H [n, D] the streams and H^ their parameter-free RMS-normalised rows,

    alpha = S_alpha + s_alpha tanh(H^ W_alpha)   [n, n+1]        beta = S_beta + s_beta tanh(H^ w_beta)   [n]
    read:  norm(sum_s alpha[s, 0] H_s)           write:  H_t <- sum_s alpha[s, 1+t] H_s + beta_t F(...)

All streams start as the embedding; the readout is norm(sum of streams). Initially sublayer k reads stream k mod n and
the mix is the identity, so the model equals a Pre-LN with the same weights; attention-out and MLP-down weights start
divided by sqrt(n).

Source: arXiv 2409.19606; DepthBench `hc`. State: live `streams` [S, B, N, D], N streams.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from .norms import RMSNorm
from .olmo import OlmoFormat
from .parameters import constant, fixed, residual_parameter
from .protocol import Connection, Cost, Kept, Read, Upcycling
from .state import DepthState
from .stream_mixing import read_streams, rms_projection, write_streams
from .streams import OLMO_ALIASES, OLMO_CLASS, OLMO_FREE, OLMO_STREAMS, StreamResidual, olmo_names, readout_norm


@dataclass(frozen=True)
class HCConfig:
    """readout: `norm_then_sum` reproduces checkpoints of an early DepthBench revision (logits differ by percents)."""

    num_streams: int = 4
    readout: Literal["sum_then_norm", "norm_then_sum"] = "sum_then_norm"
    norm_eps: float = 1e-6
    readout_norm_eps: float | None = None  # of the final norm; null: norm_eps
    row_norm_eps: float = 1e-8


class HCConnection(Connection):
    def __init__(self, sublayer: int, width: int, cfg: HCConfig, dtype: torch.dtype) -> None:
        super().__init__()
        n = cfg.num_streams
        static_alpha = torch.cat([torch.eye(n)[:, sublayer % n, None], torch.eye(n)], 1)
        self.row_norm_eps = cfg.row_norm_eps
        self.static_alpha = residual_parameter((n, n + 1), fixed(static_alpha), dtype=dtype, decay=False)
        self.dynamic_alpha = residual_parameter((width, n + 1), constant(0.0), dtype=dtype)
        self.dynamic_alpha_scale = residual_parameter((), constant(0.01), dtype=dtype)
        self.static_beta = residual_parameter((n,), constant(1.0), dtype=dtype, decay=False)
        self.dynamic_beta = residual_parameter((width,), constant(0.0), dtype=dtype)
        self.dynamic_beta_scale = residual_parameter((), constant(0.01), dtype=dtype)
        self.norm = RMSNorm(width, cfg.norm_eps, dtype)

    def read(self, state: DepthState) -> Read:
        streams_SBND = state.live["streams"]
        dtype = torch.promote_types(streams_SBND.dtype, torch.float32)
        dynamic_DM = torch.cat([self.dynamic_alpha, self.dynamic_beta.unsqueeze(-1)], -1).to(dtype)
        tanh_SBNM = torch.tanh(rms_projection(streams_SBND, dynamic_DM, self.row_norm_eps))
        alpha_SBNM = self.static_alpha.to(dtype) + self.dynamic_alpha_scale.to(dtype) * tanh_SBNM[..., :-1]
        beta_SBN = self.static_beta.to(dtype) + self.dynamic_beta_scale.to(dtype) * tanh_SBNM[..., -1]
        hidden_SBD = read_streams(streams_SBND, alpha_SBNM[..., 0])
        # contiguous: torch multiplies a batch of matrices with unusual strides one by one
        return Read(self.norm(hidden_SBD), carry=(alpha_SBNM[..., 1:].mT.contiguous(), beta_SBN))

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        mix_SBNN, beta_SBN = read.carry
        return DepthState({"streams": write_streams(state.live["streams"], mix_SBNN, beta_SBN, y)}, {})


class HCReadout(nn.Module):
    def __init__(self, width: int, cfg: HCConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.sum_first = cfg.readout == "sum_then_norm"
        self.norm = readout_norm(width, cfg, dtype)

    def forward(self, state: DepthState) -> Tensor:
        streams_SBND = state.live["streams"]
        if self.sum_first:
            normalised: Tensor = self.norm(streams_SBND.sum(-2))
            return normalised
        return torch.sum(self.norm(streams_SBND), -2)


class HC(StreamResidual, name="hc"):
    Config = HCConfig
    config: HCConfig
    olmo = OlmoFormat(
        ("hc",),
        former=("hyper_connections.kind", ("hc",)),
        names=olmo_names(
            {
                "static_alpha": "static_alpha",
                "dynamic_alpha": "dynamic_alpha_proj",
                "dynamic_alpha_scale": "dynamic_alpha_scale",
                "static_beta": "static_beta",
                "dynamic_beta": "dynamic_beta_proj",
                "dynamic_beta_scale": "dynamic_beta_scale",
            }
        ),
        aliases=OLMO_ALIASES,
        settings={"num_streams": OLMO_STREAMS},
        constants={"row_norm_eps": 1e-8},
        final_eps="readout_norm_eps",
        unsaid={"readout": ("sum_then_norm", "norm_then_sum")},
        fixed={
            "hyper_connections._CLASS_": OLMO_CLASS,
            "hyper_connections.kind": ("hc", None),
            "hyper_connections.tanh": (None, True),
            "hyper_connections.collapse": ("auto", "sum", None),
        },
        free=OLMO_FREE
        | {
            f"hyper_connections.{key}"
            for key in ("sinkhorn_iters", "liger_rms_eps", "liger_pre_eps", "liger_sinkhorn_eps", "liger_post_mult")
        },
    )

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return HCConnection(sublayer, self.shape.hidden_size, self.config, dtype)

    def readout(self, dtype: torch.dtype) -> nn.Module:
        return HCReadout(self.shape.hidden_size, self.config, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        """All streams stay equal to h; the readout's norm gets n of them."""
        scale = self.config.num_streams if self.config.readout == "sum_then_norm" else 1
        return Upcycling(replace(self.config, norm_eps=norm_eps, readout_norm_eps=norm_eps * scale**2))

    def carried(self, sublayer: int, norm_D: Tensor) -> dict[str, Tensor]:
        summed = sublayer == self.shape.num_sublayers and self.config.readout == "norm_then_sum"
        return {"norm.weight": norm_D / self.config.num_streams if summed else norm_D}

    def num_parameters(self) -> int:
        n, width, total = self.config.num_streams, self.shape.hidden_size, self.shape.num_sublayers
        return (total + 1) * width + total * (width * (n + 2) + n * n + 2 * n + 2)

    def kept(self, sublayer: int) -> Kept:
        """The streams, the branch's output, coefficients."""
        n = self.config.num_streams
        if sublayer == self.shape.num_sublayers:
            return Kept()
        return Kept(tokens=(n + 1) * self.shape.hidden_size, scalars=5 * n * (n + 2))

    def flops_per_token(self) -> Cost:
        """Per sublayer: coefficients n(n+2) products of length D, mixing n(n+1), writing n."""
        n, width, total = self.config.num_streams, self.shape.hidden_size, self.shape.num_sublayers
        flops = total * 2 * width * (n * (n + 2) + n * (n + 1) + n)
        return Cost(flops, flops)
