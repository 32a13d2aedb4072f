"""Pretrain language models whose residual connection is the experiment."""

import warnings

__version__ = "0.1.0"

# Remarks of Megatron-Core and torch to each other that no user can act on: fused libraries that are not needed here,
# names that torch deprecates and Megatron still calls, a graph leaf that Megatron's optimizer looks at by design.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.*` is deprecated",
    "Could not determine rank",
):
    warnings.filterwarnings("ignore", message=_message)
