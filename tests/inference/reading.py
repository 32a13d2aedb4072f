"""Models of every architecture read the same texts in workers, and are compared with the naive references there."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from depthbench.config.schema import RunConfig
from depthbench.inference.engine import Engine
from depthbench.model.build import build_stages
from depthbench.parallel import startup
from depthbench.pipeline.build import make_transport
from tests.harness import join_world, run_workers
from tests.models import ARCHITECTURES, Weights, load_weights, reference_shape, small_run
from tests.reference import random_weights, reference_logits

PAIRS = {"sublayers_per_block": 2}
AHEAD = ("block_attnres", PAIRS, PAIRS)  # it does reads ahead; blocks of three have too few before them in four layers
MODELS = [*ARCHITECTURES, AHEAD]
DECODED = 3  # tokens at a text's end that are read one by one


def named(number: int) -> str:
    name, residual, _ = MODELS[number]
    if MODELS[number] is AHEAD:
        return "block_attnres_ahead"
    return "full_attnres" if residual == {"sublayers_per_block": 1} else name


def run_of(number: int, parallel: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    name, residual, _ = MODELS[number]
    return small_run(name, residual, parallel={"distributed_optimizer": False, **parallel}, **sections)


def text(length: int, batch: int = 2) -> Tensor:
    return torch.randint(0, 150, (batch, length), generator=torch.Generator().manual_seed(length))


@cache
def reference(number: int, length: int) -> tuple[Weights, Tensor]:
    """Random weights, and the naive model's logits [B, T, V] of `text(length)`."""
    name, _, options = MODELS[number]
    shape = reference_shape(run_of(number, {}))
    drawn = random_weights(shape, name, torch.Generator().manual_seed(2), **options)
    weights = {key: value.detach() for key, value in drawn.items()}
    return weights, reference_logits(weights, text(length), shape, name, **options)


@dataclass(frozen=True)
class Found:
    """Of one text, chunk and page: differences to the reference over its largest logit. every: of all positions. last:
    of the last alone, of all but the last three tokens. decoded: of those three, one by one. next: whether the likely
    next tokens are the reference's."""

    every: float
    last: float
    decoded: float
    next: bool


Settings = tuple[int, int | None, int | None]
"""Length of the text, chunk, page."""


def read_all(
    rank: int, world_size: int, store: str, parallel: dict[str, Any], settings: list[Settings], expected: Any
) -> list[dict[Settings, Found]]:
    """By architecture; nothing on ranks that have no logits. expected: `reference`'s answers by architecture and
    length."""
    join_world(rank, world_size, store)
    context = startup.start(run_of(0, parallel))
    found = []
    for number in range(len(MODELS)):
        run = run_of(number, parallel)
        transport = make_transport(run, context)
        stages = build_stages(run, context, transport, draw=False)
        for stage in stages:
            load_weights(stage, expected[number, settings[0][0]][0])
        own = {}
        for length, chunk, page in settings:
            engine = Engine(stages, transport, 2, length, page)
            one = _read(engine, text(length), chunk, expected[number, length][1], run.parallel.shards_tokens)
            if one:
                own[length, chunk, page] = one
        found.append(own)
    return found


class Shares:
    """What this rank's depth state has been since the last `take`."""

    def __init__(self, engine: Engine) -> None:
        self.states: list[Tensor] = []
        self.context = engine.context
        for stage in engine.stages:
            stage.observer = lambda _, state, stage=stage: self.states.append(stage.residual.probe(state))

    def replicated(self) -> bool:
        """Whether it has been the same on the ranks that share matmuls. A collective call of theirs."""
        mine = torch.stack(self.states)
        everyone = [torch.empty_like(mine) for _ in range(self.context.tp_size)]
        torch.distributed.all_gather(everyone, mine, group=self.context.tp_group)
        return all(torch.equal(mine, other) for other in everyone)

    def take(self) -> set[int]:
        """How many tokens it has had."""
        states, self.states = self.states, []
        return {len(state) for state in states}


def shares(tokens: int, chunk: int | None, ranks: int) -> set[int]:
    """Of the pieces of a text on one of the ranks that share it."""
    chunk = chunk or tokens
    return {-(-min(chunk, tokens - start) // ranks) for start in range(0, tokens, chunk)}


def _read(engine: Engine, tokens: Tensor, chunk: int | None, expected: Tensor, sharded: bool) -> Found | None:
    length, ranks = tokens.shape[1], engine.context.tp_size if sharded else 1
    first = length - DECODED
    seen = Shares(engine)
    every = engine.read(tokens, chunk, every=True)
    assert seen.take() == shares(length, chunk, ranks)
    engine.reset()
    last = engine.read(tokens[:, :first], chunk)
    assert seen.take() == shares(first, chunk, ranks)
    decoded = [engine.read(tokens[:, at : at + 1]) for at in range(first, length)]
    assert seen.replicated() and seen.take() == {1}
    if every is None or last is None:
        return None

    def apart(ours: Tensor, theirs: Tensor) -> float:
        assert ours.shape == theirs.shape
        return float((ours - theirs).abs().max() / expected.abs().max())

    one_by_one = torch.stack([one for one in decoded if one is not None], 1)
    return Found(
        apart(every, expected),
        apart(last, expected[:, first - 1]),
        apart(one_by_one, expected[:, first:]),
        torch.equal(every.argmax(-1), expected.argmax(-1))
        and torch.equal(last.argmax(-1), every[:, first - 1].argmax(-1)),
    )


def compared(world_size: int, parallel: dict[str, Any], settings: list[Settings]) -> list[list[dict[Settings, Found]]]:
    """By rank and architecture."""
    lengths = {length for length, _, _ in settings}
    expected = {(number, length): reference(number, length) for number in range(len(MODELS)) for length in lengths}
    return run_workers(world_size, read_all, parallel, settings, expected)
