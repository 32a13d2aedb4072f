"""The simulated pass: closed forms of the two schedules, what messages cost, and that it always ends."""

import random
import time
from dataclasses import replace
from itertools import islice
from math import isclose

import pytest

from depthbench.pipeline.layout import layout
from depthbench.pipeline.message import Label
from depthbench.planning.schedule import Action, Compute, Receive, Send, Wait, schedule
from depthbench.planning.simulate import Costs, Simulation, simulate
from tests.pipeline.test_order import sizes


def costs(chunks: int, forward: float = 1.0, backward: float = 2.0, message: float = 0.0) -> Costs:
    edges = [message] * (chunks - 1)
    return Costs([forward] * chunks, [backward] * chunks, edges, edges)


def run(
    stages: int,
    virtual: int,
    count: int,
    group: int,
    given: Costs,
    *,
    overlap: bool = False,
    forward_only: bool = False,
) -> Simulation:
    where = layout(stages * virtual, stages, virtual)
    return simulate(schedule(where, count, group, overlap_p2p=overlap, forward_only=forward_only), given)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
def test_1f1b_with_free_messages(stages: int) -> None:
    """(n + P - 1)(f + b), of which (P - 1)(f + b) idle."""
    for count in (stages, stages + 1, 4 * stages):
        found = run(stages, 1, count, stages, costs(stages, 1.5, 2.5))
        assert isclose(found.seconds, 4 * (count + stages - 1))
        assert isclose(found.bubble, (stages - 1) / (count + stages - 1))
        assert found.busy == (4 * count,) * stages


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("virtual", [2, 3, 4])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_interleaving_with_free_messages(stages: int, virtual: int, overlap: bool) -> None:
    """(nV + P - 1)(f + b) for chunks of f and b: idle time over busy time is (P - 1) / (nV)."""
    for count in (stages, 2 * stages, 4 * stages):
        found = run(stages, virtual, count, stages, costs(stages * virtual), overlap=overlap)
        assert isclose(found.seconds, 3 * (count * virtual + stages - 1))
        assert isclose(sum(found.idle) / sum(found.busy), (stages - 1) / virtual / count)


def test_forward_alone() -> None:
    """A fill of P - 1 chunks, then one chunk after the other."""
    assert isclose(run(4, 1, 6, 4, costs(4), forward_only=True).seconds, 6 + 3)
    assert isclose(run(4, 2, 8, 4, costs(8), forward_only=True).seconds, 8 * 2 + 3)


def test_a_message_delays_what_waits_for_it() -> None:
    """Two stages, one microbatch: forward, its message, forward, backward, its message, backward."""
    found = run(2, 1, 1, 2, Costs([1.0, 2.0], [3.0, 4.0], [0.25], [0.5]))
    assert found.seconds == 1 + 0.25 + 2 + 4 + 0.5 + 3
    assert found.exposed == (0.5, 0.25 + 0.5), "the last stage waits until its last message is through"
    assert [(s.stage, s.backward, s.begin, s.end) for s in found.timeline] == [
        (0, False, 0, 1),
        (0, True, 7.75, 10.75),
        (1, False, 1.25, 3.25),
        (1, True, 3.25, 7.25),
    ]


def test_messages_of_one_way_go_one_after_the_other() -> None:
    """Two are sent at once; the second is through after both."""
    one, two = (Label(False, 1, microbatch) for microbatch in (0, 1))
    sender: list[Action] = [Send(one), Send(two), Wait(two)]
    receiver: list[Action] = [Compute(1, 9, False), Receive(one), Receive(two), Wait(one), Wait(two)]
    found = simulate([sender, receiver], costs(2, message=10.0))
    assert found.seconds == 1 + 10 + 10
    assert found.exposed == (10, 20), "of the sender's wait for the second, only the time in which that one goes"


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_hides_messages(overlap: bool) -> None:
    """In the interleaved steady state messages cost nothing with overlap, until they take longer than the chunk runs
    beside them."""
    free = run(4, 2, 64, 4, costs(8)).seconds
    slow = run(4, 2, 64, 4, costs(8, message=0.2), overlap=overlap).seconds
    assert slow > free
    assert (slow < 1.02 * free) is overlap


def test_never_faster_for_higher_costs() -> None:
    """Of any chunk run or message, in any schedule."""
    draw = random.Random(0)
    for _ in range(60):
        stages = draw.choice([2, 3, 4])
        virtual, count, group = draw.choice([size for size in sizes(stages) if size[0] < 4])
        chunks, overlap = stages * virtual, virtual > 1 and draw.random() < 0.5
        low = Costs(*([draw.uniform(0, 2) for _ in range(n)] for n in (chunks, chunks, chunks - 1, chunks - 1)))
        kind = draw.choice(["forward", "backward", "forward_edges", "backward_edges"])
        values = list(getattr(low, kind))
        values[draw.randrange(len(values))] += 1.0
        before = run(stages, virtual, count, group, low, overlap=overlap)
        after = run(stages, virtual, count, group, replace(low, **{kind: values}), overlap=overlap)
        assert after.seconds >= before.seconds - 1e-9


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("stages", range(2, 9))
def test_it_ends_and_computes_everything_once(stages: int, forward_only: bool) -> None:
    """No stage idles for less than no time, and each run of a chunk begins when its input's chunk has ended. Of seven
    and eight stages every fifth size."""
    for virtual, count, group in islice(sizes(stages), None, None, 1 if stages < 7 else 5):
        for overlap in (False, True) if virtual > 1 else (False,):
            each = costs(stages * virtual, message=0.5)
            found = run(stages, virtual, count, group, each, overlap=overlap, forward_only=forward_only)
            ends = {(s.chunk, s.microbatch, s.backward): s.end for s in found.timeline}
            passes = 1 if forward_only else 2
            assert len(ends) == len(found.timeline) == passes * stages * virtual * count
            for span in found.timeline:
                neighbour = span.chunk + (1 if span.backward else -1)
                before = ends.get((neighbour, span.microbatch, span.backward))
                assert before is None or before + 0.5 <= span.begin
            assert min(found.idle) >= 0 and all(e <= i + 1e-9 for e, i in zip(found.exposed, found.idle, strict=True))


def test_stages_that_wait_for_each_other_are_named() -> None:
    """Instead of running for ever."""
    a, b = Label(False, 1, 0), Label(True, 1, 0)
    stages: list[list[Action]] = [[Receive(b), Wait(b), Send(a)], [Receive(a), Wait(a), Send(b)]]
    with pytest.raises(RuntimeError, match=r"stage 0 for the backward message .* stage 1 for the forward message"):
        simulate(stages, costs(2))


def test_it_is_fast() -> None:
    """A large pipeline takes well under a second; the bound leaves room for a busy machine."""
    before = time.process_time()
    run(16, 4, 128, 16, costs(64, message=0.1))
    assert time.process_time() - before < 3
