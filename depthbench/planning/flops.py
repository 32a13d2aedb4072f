"""FLOPs of a run's model: multiply-add is 2; norms, softmax and element-wise work are not counted.

Two counts of a forward pass over one sequence, which agree on the blocks' projections and differ in the rest:

                    head over       causal attention, a layer            residual path
    prefill_paper   last position   2 T^2 H K (half the full matrix)     `Cost.paper`
    forward_exact   all positions   2 T (T + 1) H K (the pairs s <= t)   `Cost.exact`

`prefill_paper` is the DepthBench paper's (arXiv 2609.32534, its FLOPs table): with MHA it reduces to
L (8 T D^2 + 6 T D F + 2 T^2 D) + 2 D V + residual. `forward_exact` is what the graph built here multiplies, so it is
the one for MFU; what recomputation repeats is not counted (that would be hardware utilisation).

Letters: T tokens, L layers, D hidden, F FFN width, H heads, G KV heads, K head dim, V vocabulary without padding.
"""

from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.errors import UserError
from depthbench.model.config import ModelConfig

from .parameters import block_weights

BACKWARD_OVER_FORWARD = 2  # every matmul has a gradient towards each of its two factors


def prefill_paper(run: RunConfig, tokens: int) -> float:
    """Forward FLOPs of one sequence by the paper's formulas.

    Raises UserError if `tokens` is below 1 or the residual settings cannot work at the model's shape.
    """
    model = run.model
    attention = 2 * tokens**2 * _heads_width(model)
    head = 2 * model.hidden_size * model.vocab_size
    return _blocks(model, tokens, attention) + head + tokens * residual_of(run).flops_per_token().paper


def forward_exact(run: RunConfig, tokens: int) -> float:
    """Forward FLOPs of one training sequence as built.

    Raises UserError if `tokens` is below 1 or the residual settings cannot work at the model's shape.
    """
    model = run.model
    attention = 2 * tokens * (tokens + 1) * _heads_width(model)
    head = 2 * tokens * model.hidden_size * model.vocab_size
    return _blocks(model, tokens, attention) + head + tokens * residual_of(run).flops_per_token().exact


def train_per_token(run: RunConfig) -> float:
    """Forward and backward FLOPs per token of training, at the model's sequence length."""
    tokens = run.model.sequence_length
    return (1 + BACKWARD_OVER_FORWARD) * forward_exact(run, tokens) / tokens


def _heads_width(model: ModelConfig) -> int:
    return model.num_attention_heads * model.head_size


def _blocks(model: ModelConfig, tokens: int, attention: int) -> int:
    """All blocks' projections, each weight used once a token, and `attention` FLOPs a layer."""
    if tokens < 1:
        raise UserError(f"FLOPs of a sequence of {tokens} tokens: give at least 1")
    return model.num_layers * (2 * tokens * block_weights(model) + attention)
