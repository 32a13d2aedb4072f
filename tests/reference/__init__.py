"""Naive float64 references of the residual architectures: the oracle that depthbench is compared with.

Nothing here imports depthbench, and nothing is fast. `layers.py` has the parts all architectures share, one file per
architecture has its residual equations, `model.py` puts embedding and head around them, and `weights.py` names and
draws the weights.
"""

from .layers import Shape
from .model import reference_logits, reference_loss
from .weights import parameter_shapes, random_weights

__all__ = ["Shape", "parameter_shapes", "random_weights", "reference_logits", "reference_loss"]
