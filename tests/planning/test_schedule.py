"""The written-down schedules are what Megatron-Core's do: its own code runs, a thread a stage, over a network as strict
as NCCL, and every chunk run, message started and wait is noted."""

import random
from dataclasses import dataclass, field
from typing import Any

import megatron.core
import pytest
from torch import Tensor

from depthbench.pipeline.communicator import Communicator, Handle
from depthbench.pipeline.message import Label
from depthbench.planning.schedule import Action, Compute, Receive, Send, Wait, schedule
from tests.pipeline import test_order
from tests.pipeline.network import calls, here
from tests.pipeline.test_order import Pass, layout_of, run_schedule, sizes

__all__ = ["calls"]  # a fixture

NEWER = tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 17)
WAITS_AS_WRITTEN = pytest.mark.skipif(NEWER, reason="with overlap, newer versions wait in another order")


@dataclass
class Noted:
    """Each stage's actions."""

    stages: dict[int, list[Action]] = field(default_factory=dict)

    def note(self, action: Action) -> None:
        self.stages.setdefault(here.me, []).append(action)


class NotedWork:
    """Notes when a stage waits for a message."""

    def __init__(self, work: Any, label: Label, noted: Noted) -> None:
        self.work, self.label, self.noted = work, label, noted

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        self.noted.note(Wait(self.label))
        self.work.wait()


@pytest.fixture
def noted(calls: None, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """What `run_schedule` does from now on."""
    found = Noted()

    class NotedCommunicator(Communicator):
        def _send(self, packed: Tensor, *, backward: bool) -> Handle:
            handle = super()._send(packed, backward=backward)
            found.note(Send(handle.label))
            handle.work = NotedWork(handle.work, handle.label, found)
            return handle

        def _receive(self, *, backward: bool) -> Handle:
            handle = super()._receive(backward=backward)
            found.note(Receive(handle.label))
            handle.work = NotedWork(handle.work, handle.label, found)
            return handle

    class NotedChunk(test_order.Chunk):
        def forward(self) -> Tensor:
            found.note(Compute(self.number, self.decoder.current_microbatch, False))
            return super().forward()

        def check(self, microbatch: int, grad: Tensor) -> None:
            found.note(Compute(self.number, microbatch, True))
            super().check(microbatch, grad)

    monkeypatch.setattr(test_order, "Communicator", NotedCommunicator)
    monkeypatch.setattr(test_order, "Chunk", NotedChunk)
    return found


def same(one: Pass, noted: Noted) -> None:
    noted.stages.clear()
    run_schedule(one)
    ours = schedule(layout_of(one), one.count, one.group, overlap_p2p=one.overlap, forward_only=one.forward_only)
    for stage, actions in enumerate(ours):
        assert actions == noted.stages[stage], (one, stage)


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_one_chunk_a_stage(stages: int, forward_only: bool, noted: Noted) -> None:
    """Every number of microbatches up to twice the stages."""
    for count in range(stages, 2 * stages + 1):
        same(Pass(stages, 1, count, stages, forward_only=forward_only), noted)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=WAITS_AS_WRITTEN)])
@pytest.mark.parametrize("virtual", [2, 3])
@pytest.mark.parametrize("stages", [2, 3])
def test_interleaved(stages: int, virtual: int, overlap: bool, noted: Noted) -> None:
    """Every group of every number of microbatches up to twice the stages: also where all runs are warm-up."""
    for chunks, count, group in sizes(stages):
        if chunks == virtual and count <= 2 * stages + 1:
            same(Pass(stages, virtual, count, group, overlap), noted)


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=WAITS_AS_WRITTEN)])
@pytest.mark.parametrize("virtual", [2, 4])
@pytest.mark.parametrize("stages", [2, 4, 5, 8])
def test_interleaved_drawn_at_random(stages: int, virtual: int, overlap: bool, noted: Noted) -> None:
    """With more stages and chunks, and passes without gradients."""
    draw = random.Random(10 * stages + virtual)
    options = [(count, group) for chunks, count, group in sizes(stages) if chunks == virtual]
    same(Pass(stages, virtual, *draw.choice(options), overlap), noted)
    same(Pass(stages, virtual, *draw.choice(options), overlap, forward_only=True), noted)


def test_one_stage_runs_each_microbatch_forward_and_back() -> None:
    """There is nobody to wait for."""
    one = Pass(1, 1, 2, 1)
    assert schedule(layout_of(one), one.count, one.group) == [
        [Compute(0, microbatch, backward) for microbatch in range(2) for backward in (False, True)]
    ]


def test_without_overlap_a_stage_waits_for_its_input_and_its_gradient_together() -> None:
    """In the interleaved steady state: two runs, then everything at once, then two waits."""
    second = schedule(layout_of(Pass(3, 2, 9, 3)), 9, 3)[1]
    at = second.index(Compute(4, 0, True))
    assert [type(action) for action in second[at - 1 : at + 9]] == [
        *(Compute, Compute, Wait, Send, Receive, Send, Receive, Wait, Wait, Compute),
    ]
