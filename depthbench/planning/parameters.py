"""Exact parameter counts of a run's model. Padding of the vocabulary is not counted: it is storage, not model."""

from dataclasses import dataclass

from depthbench.config.schema import RunConfig
from depthbench.config.validate import residual_of
from depthbench.model.config import ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Numbers of scalars.

    backbone: attention and MLP weights of all blocks. embedding: the input table, and the head unless tied.
    residual: everything the architecture owns, all norms included (so also the final one).
    """

    backbone: int
    embedding: int
    residual: int

    @property
    def total(self) -> int:
        return self.backbone + self.embedding + self.residual


def block_weights(model: ModelConfig) -> int:
    """Attention and MLP weights of one block: q and out [H K, D], k and v [G K, D]; gate, up and down [F, D]."""
    attention = 2 * (model.num_attention_heads + model.kv_heads) * model.head_size
    return model.hidden_size * (attention + 3 * model.ffn_hidden_size)


def count_parameters(run: RunConfig) -> Parameters:
    """Raises UserError where the residual settings cannot work at the model's shape."""
    model = run.model
    tables = 1 if model.tie_embeddings else 2
    return Parameters(
        backbone=model.num_layers * block_weights(model),
        embedding=tables * model.vocab_size * model.hidden_size,
        residual=residual_of(run).num_parameters(),
    )
