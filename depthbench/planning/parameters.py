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


@dataclass(frozen=True)
class RankWeights:
    """total: scalars that a rank holds, padding of the vocabulary counted. largest: of one weight."""

    total: int
    largest: int


def rank_weights(run: RunConfig, first: int, last: int) -> RankWeights:
    """Of blocks [first, last) and the tables that go with them, on one rank of its tensor-parallel group. The residual
    path's are dealt out evenly by block; ranks share its extra projections, and each has all of the rest."""
    model, ranks = run.model, run.parallel.tensor
    table = model.padded_vocab(ranks) // ranks * model.hidden_size
    ends = (first == 0) + (last == model.num_layers)
    if model.tie_embeddings:
        ends = min(ends, 1)
    residual = residual_of(run)
    shared = [
        sum(projection.rows for projection in residual.extra_projections(block)) * model.hidden_size
        for block in range(model.num_layers)
    ]
    own = (residual.num_parameters() - sum(shared)) * (last - first) // model.num_layers
    blocks = ((last - first) * block_weights(model) + sum(shared[first:last])) // ranks
    largest = max(2 * model.ffn_hidden_size * model.hidden_size // ranks, table if ends else 0)
    return RankWeights(blocks + own + ends * table, largest)
