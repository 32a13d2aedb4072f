"""Everything is imported here, once, so that forked workers start in a fraction of a second."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

# which Megatron-Core imports late: at a first step, and at a first checkpoint
import megatron.core.dist_checkpointing.strategies.torch  # noqa: E402
import megatron.core.transformer.multi_token_prediction  # noqa: E402, F401

from depthbench.parallel import cpu_stand_in  # noqa: E402
from depthbench.training import trainer  # noqa: E402, F401
from tests.corpora import corpus  # noqa: E402, F401

cpu_stand_in.install()
