"""Learning rate as a pure function of the step."""

import math

from depthbench.config.schema import OptimizerConfig


def learning_rate(update: int, steps: int, config: OptimizerConfig) -> float:
    """Rate of the `update`-th update, 1 <= update <= steps: linear from 0 to the peak over the warm-up, then half a
    cosine down to `min_lr_ratio` of it at the last update."""
    warmup = round(steps * config.warmup_fraction)
    if update <= warmup:
        return config.lr * update / warmup
    progress = (update - warmup) / max(steps - warmup, 1)
    floor = config.lr * config.min_lr_ratio
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * progress))
