"""Tokens, and how they are cut into the pieces that go through the model one after the other."""

from dataclasses import dataclass

from depthbench.errors import UserError
from depthbench.pipeline.edges import Local


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + count) of the sequence; after them `padding` more that nobody reads, so that the piece
    divides over the ranks that share its tokens."""

    start: int
    count: int
    padding: int

    @property
    def length(self) -> int:
        return self.count + self.padding


def cut(start: int, tokens: int, chunk: int, ranks: int) -> list[Piece]:
    """Pieces of `chunk` tokens, the last one shorter, padded to multiples of `ranks`."""
    ends = [*range(start + chunk, start + tokens, chunk), start + tokens]
    return [
        Piece(begin, end - begin, -(end - begin) % ranks) for begin, end in zip([start, *ends[:-1]], ends, strict=True)
    ]


def share(piece: Piece, batch: int, ranks: int, *, sharded: bool) -> Local:
    """What a rank holds of the piece's depth state."""
    return Local(sequence=piece.length, microbatch=batch, tensor_parallel=ranks, sequence_parallel=sharded)


def check_chunk(chunk: int, ranks: int) -> None:
    """Raises UserError where a chunk has not one token for each of the `ranks` that share it."""
    if chunk < ranks:
        shared = f" cannot be shared by parallel.tensor={ranks} ranks" if chunk > 0 else ""
        way_out = ", or set parallel.sequence=false" if chunk > 0 else ""
        raise UserError(f"a chunk of {chunk} tokens{shared}: give at least {ranks}{way_out}")


def check_ids(low: int, high: int, vocab_size: int) -> None:
    """Raises UserError where a text's ids, from `low` to `high`, are not all of the vocabulary."""
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"token id {low if low < 0 else high} is outside the vocabulary, 0 .. {vocab_size - 1}: was the text made "
            "into tokens by another tokenizer?"
        )
