"""Manifold-constrained Hyper-Connections: n streams, mixed by a (nearly) doubly stochastic matrix of each token.

With x [nD] the streams H [n, D] in a row, and m = x phi / sqrt(mean(x^2) + eps) split into pre, post and res,

    pre = sigmoid(a_pre m_pre + b_pre)    post = 2 sigmoid(a_post m_post + b_post)    R = sinkhorn(a_res m_res + b_res)
    read:  norm(sum_s pre_s H_s)          write:  H_t <- sum_s R[t, s] H_s + post_t F(...)

All streams start as the embedding; the readout is norm(mean of streams). Initially sublayer k reads stream k mod n,
writes to all with weight 1, and R is nearly the identity (DepthBench's "GAP-8" biases; `near_uniform`: an older
revision's, with pre = 1/2, R = 1/n and a random phi); attention-out and MLP-down weights are divided by sqrt(n).

Source: arXiv 2512.24880; DepthBench `mhc` (`liger_mhc`). State: live `streams` [S, B, N, D].
Shapes: S tokens, B microbatch, N streams, D hidden.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from .norms import RMSNorm
from .olmo import OlmoFormat, OlmoSetting
from .parameters import Init, constant, fixed, residual_parameter, truncated_normal
from .protocol import Connection, Cost, Kept, Read, Shape, Upcycling
from .sinkhorn import sinkhorn
from .state import DepthState
from .stream_mixing import read_streams, rms_projection, write_streams
from .streams import OLMO_ALIASES, OLMO_CLASS, OLMO_FREE, OLMO_STREAMS, StreamResidual, olmo_names, readout_norm

GAP = 8.0  # between the initial bias of the stream that is read, or kept, and the others'
UPCYCLED_SINKHORN_EPS = 1e-12  # 1e-6 would shrink h by as much at every sublayer
PHI_STD = 0.02  # of phi with near-uniform routing


@dataclass(frozen=True)
class MHCConfig:
    num_streams: int = 4
    sinkhorn_iterations: int = 20
    sinkhorn_order: Literal["rows_first", "columns_first"] = "rows_first"  # columns_first, eps 0: the paper's
    sinkhorn_eps: float = 1e-6  # added after the first normalisation, and to every later denominator
    init: Literal["gap8", "near_uniform"] = "gap8"  # read and keep one stream, nearly Pre-LN; or average them all
    readout: Literal["mean_then_norm", "sum_then_norm"] = "mean_then_norm"
    norm_eps: float = 1e-6
    readout_norm_eps: float | None = None  # of the final norm; null: norm_eps
    coefficient_eps: float = 1e-6  # of the streams' joint norm


class MHCConnection(Connection):
    def __init__(self, sublayer: int, width: int, cfg: MHCConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.cfg = cfg
        n = cfg.num_streams
        read_bias = torch.full((n,), -GAP)
        read_bias[sublayer % n] = GAP
        bias = torch.cat([read_bias, torch.zeros(n), (GAP * (torch.eye(n) - 1)).flatten()])
        initial_phi = constant(0.0)
        if cfg.init == "near_uniform":
            bias, initial_phi = torch.zeros_like(bias), truncated_normal(PHI_STD)
        self.phi = residual_parameter((n * width, n * n + 2 * n), initial_phi, dtype=dtype)

        def fixed_routing(shape: tuple[int, ...], init: Init) -> nn.Parameter:
            return residual_parameter(shape, init, dtype=dtype, decay=False, keep_float32=True)

        self.bias = fixed_routing((n * n + 2 * n,), fixed(bias))
        self.scale_pre = fixed_routing((), constant(0.01))
        self.scale_post = fixed_routing((), constant(0.01))
        self.scale_res = fixed_routing((), constant(0.01))
        self.norm = RMSNorm(width, cfg.norm_eps, dtype)

    def read(self, state: DepthState) -> Read:
        streams_SBND, cfg = state.live["streams"], self.cfg
        n = cfg.num_streams
        dtype = torch.promote_types(streams_SBND.dtype, torch.float32)
        m = rms_projection(streams_SBND.flatten(-2), self.phi.to(dtype), cfg.coefficient_eps)
        m_pre, m_post, m_res = m.split([n, n, n * n], -1)
        b_pre, b_post, b_res = self.bias.to(dtype).split([n, n, n * n])
        pre_SBN = torch.sigmoid(self.scale_pre.to(dtype) * m_pre + b_pre)
        post_SBN = 2 * torch.sigmoid(self.scale_post.to(dtype) * m_post + b_post)
        logits_SBNN = (self.scale_res.to(dtype) * m_res + b_res).unflatten(-1, (n, n))
        rows_first = cfg.sinkhorn_order == "rows_first"
        mixing_SBNN = sinkhorn(logits_SBNN, cfg.sinkhorn_iterations, cfg.sinkhorn_eps, rows_first=rows_first)
        return Read(self.norm(read_streams(streams_SBND, pre_SBN)), carry=(mixing_SBNN, post_SBN))

    def write(self, state: DepthState, read: Read, y: Tensor, taps: Mapping[str, Tensor]) -> DepthState:
        mixing_SBNN, post_SBN = read.carry
        return DepthState({"streams": write_streams(state.live["streams"], mixing_SBNN, post_SBN, y)}, {})


class MHCReadout(nn.Module):
    def __init__(self, width: int, cfg: MHCConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.mean = cfg.readout == "mean_then_norm"
        self.norm = readout_norm(width, cfg, dtype)

    def forward(self, state: DepthState) -> Tensor:
        streams_SBND = state.live["streams"]
        normalised: Tensor = self.norm(streams_SBND.mean(-2) if self.mean else streams_SBND.sum(-2))
        return normalised


class MHC(StreamResidual, name="mhc"):
    Config = MHCConfig
    config: MHCConfig
    olmo = OlmoFormat(
        ("mhc",),
        former=("hyper_connections.kind", ("mhc", "mhc_static", "liger_mhc")),
        names=olmo_names(
            {
                "phi": "phi",
                "bias": "b",
                "scale_pre": "alpha_pre",
                "scale_post": "alpha_post",
                "scale_res": "alpha_res",
            }
        ),
        aliases=OLMO_ALIASES,
        settings={
            "num_streams": OLMO_STREAMS,
            "sinkhorn_iterations": OlmoSetting("hyper_connections.sinkhorn_iters", 20),
            "sinkhorn_eps": OlmoSetting("hyper_connections.liger_sinkhorn_eps", 1e-6),
            "coefficient_eps": OlmoSetting("hyper_connections.liger_rms_eps", 1e-6),
            "readout": OlmoSetting(
                "hyper_connections.collapse",
                "auto",
                {"auto": "mean_then_norm", "mean": "mean_then_norm", "sum": "sum_then_norm"},
            ),
        },
        constants={"sinkhorn_order": "rows_first"},
        final_eps="readout_norm_eps",
        fixed={  # of its three kinds, one computes this
            "hyper_connections._CLASS_": OLMO_CLASS,
            "hyper_connections.kind": ("liger_mhc",),
            "hyper_connections.liger_pre_eps": (0.0, None),
            "hyper_connections.liger_post_mult": (2.0, None),
        },
        free=OLMO_FREE | {"hyper_connections.tanh"},
    )

    def __init__(self, config: MHCConfig, shape: Shape) -> None:
        super().__init__(config, shape)
        if config.sinkhorn_iterations < 1:
            raise ValueError(f"residual.sinkhorn_iterations={config.sinkhorn_iterations} must be at least 1")

    def connection(self, sublayer: int, dtype: torch.dtype) -> Connection:
        return MHCConnection(sublayer, self.shape.hidden_size, self.config, dtype)

    def readout(self, dtype: torch.dtype) -> nn.Module:
        return MHCReadout(self.shape.hidden_size, self.config, dtype)

    def from_pre_ln(self, norm_eps: float) -> Upcycling:
        """All streams stay equal to h: each gets all of y (2 sigmoid(0) = 1), and rows of R sum to what its columns
        do, 1 up to the Sinkhorn eps. A branch reads slightly more than h, which its norm undoes."""
        n = self.config.num_streams
        read = 1 / (1 + math.exp(-GAP)) + (n - 1) / (1 + math.exp(GAP))
        scale = 1 if self.config.readout == "mean_then_norm" else n
        config = replace(
            self.config,
            norm_eps=norm_eps * read**2,
            readout_norm_eps=norm_eps * scale**2,
            sinkhorn_eps=min(self.config.sinkhorn_eps, UPCYCLED_SINKHORN_EPS),
        )
        random = "with init=near_uniform routing starts from a random phi; init=gap8 would keep the function"
        return Upcycling(config, "" if self.config.init == "gap8" else random)

    def num_parameters(self) -> int:
        n, width, total = self.config.num_streams, self.shape.hidden_size, self.shape.num_sublayers
        return (total + 1) * width + total * (n * width * (n * n + 2 * n) + n * n + 2 * n + 3)

    def kept(self, sublayer: int) -> Kept:
        """The streams, the branch's output, coefficients."""
        n = self.config.num_streams
        if sublayer == self.shape.num_sublayers:
            return Kept()
        return Kept(tokens=(n + 1) * self.shape.hidden_size, scalars=3 * n * (n + 2))

    def flops_per_token(self) -> Cost:
        """Per sublayer: coefficients n(n^2 + 2n) products of length D, reading n, mixing n^2, writing n."""
        n, width, total = self.config.num_streams, self.shape.hidden_size, self.shape.num_sublayers
        flops = total * 2 * width * (n * (n * n + 2 * n) + n + n * n + n)
        return Cost(flops, flops)
