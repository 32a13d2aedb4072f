"""Names, shapes and random values of every weight.

Values are far from an initialisation on purpose: with zero queries or identity routing most mistakes do not show.
"""

from typing import Any

import torch
from torch import Tensor

from .layers import Shape


def residual_shapes(
    architecture: str, sublayer: str, block: int, shape: Shape, num_streams: int, key_norm: bool
) -> dict[str, tuple[int, ...]]:
    """Residual parameters of one sublayer ("attention" or "mlp")."""
    d, n, kv = shape.hidden_size, num_streams, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (d,)}
    if architecture == "sandwich_ln" or (architecture == "keel" and (block, sublayer) != (0, "attention")):
        shapes |= {"post_norm.weight": (d,)}
    if architecture == "block_attnres" and (block, sublayer) != (0, "attention"):
        shapes |= {"query": (d,)} | ({"key_norm.weight": (d,)} if key_norm else {})
    if architecture == "hc":
        shapes |= {"static_alpha": (n, n + 1), "dynamic_alpha": (d, n + 1), "dynamic_alpha_scale": ()}
        shapes |= {"static_beta": (n,), "dynamic_beta": (d,), "dynamic_beta_scale": ()}
    if architecture == "mhc":
        shapes |= {"phi": (n * d, n * n + 2 * n), "bias": (n * n + 2 * n,)}
        shapes |= {"scale_pre": (), "scale_post": (), "scale_res": ()}
    if architecture == "moda" and sublayer == "mlp" and block < shape.num_layers - 1:
        shapes |= {"depth_k.weight": (kv, d), "depth_v.weight": (kv, d)}
    return shapes


def parameter_shapes(
    shape: Shape, architecture: str, num_streams: int = 4, key_norm: bool = True, **_options: Any
) -> dict[str, tuple[int, ...]]:
    """Every weight's shape; takes the options of reference_logits, of which only these two matter."""
    d, f, v = shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linears = {
        "attention": {"q.weight": (q, d), "k.weight": (kv, d), "v.weight": (kv, d), "out.weight": (d, q)},
        "mlp": {"gate.weight": (f, d), "up.weight": (f, d), "down.weight": (d, f)},
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (v, d)}
    for block in range(shape.num_layers):
        for sublayer in ("attention", "mlp"):
            name = f"blocks.{block}.{sublayer}"
            residual = residual_shapes(architecture, sublayer, block, shape, num_streams, key_norm)
            shapes |= {f"{name}.{key}": size for key, size in linears[sublayer].items()}
            shapes |= {f"{name}_residual.{key}": size for key, size in residual.items()}
    if architecture == "block_attnres":
        shapes |= {"readout.query": (d,)} | ({"readout.key_norm.weight": (d,)} if key_norm else {})
    shapes["readout.norm.weight"] = (d,)
    if not shape.tied:
        shapes["head.weight"] = (v, d)
    return shapes


def random_weights(shape: Shape, architecture: str, generator: torch.Generator, **options: Any) -> dict[str, Tensor]:
    """Float64 leaves: linears normal / sqrt(fan in), norm gains 1 +- 0.3, routing large enough to matter.

    The scales of HC's dynamic parts are 0.2, not more, so that eight layers can be compared to 1e-10: there a change of
    the weights by 2e-16 of themselves changes gradients by 2e-12 of themselves. With 0.5 it would be 3e-9.
    """
    mean_and_spread = {
        "embedding.weight": (0.0, 1.0),
        "norm.weight": (1.0, 0.3),
        "query": (0.0, 1.5 / shape.hidden_size**0.5),
        "static_alpha": (0.0, 0.4),
        "static_beta": (0.0, 1.0),
        "dynamic_alpha": (0.0, shape.hidden_size**-0.5),
        "dynamic_beta": (0.0, shape.hidden_size**-0.5),
        "dynamic_alpha_scale": (0.2, 0.1),
        "dynamic_beta_scale": (0.2, 0.1),
        "phi": (0.0, (options.get("num_streams", 4) * shape.hidden_size) ** -0.5),
        "bias": (0.0, 2.0),
        "scale_pre": (1.5, 0.1),
        "scale_post": (1.5, 0.1),
        "scale_res": (1.5, 0.1),
    }
    weights = {}
    for name, size in parameter_shapes(shape, architecture, **options).items():
        fan_in_rule = (0.0, size[-1] ** -0.5 if size else 1.0)
        mean, spread = next((rule for end, rule in mean_and_spread.items() if name.endswith(end)), fan_in_rule)
        value = mean + spread * torch.randn(size, generator=generator, dtype=torch.float64)
        weights[name] = value.requires_grad_()
    return weights
