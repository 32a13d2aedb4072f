"""The order of messages is that of Megatron-Core's own schedules, at both ends of every edge, and no rank waits for
ever.

The schedules run for real, a thread a rank, with the product's communicator and flows on a network as strict as NCCL:
messages of one queue go one at a time in the order in which a process has started them, and each only once the other
process has come to it too. One thread runs at a time, so a deadlock is seen at once: all of them wait.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_schedule_table,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from depthbench.model.stage import ScheduleSeam
from depthbench.parallel.megatron import megatron_config
from depthbench.pipeline import communicator, message
from depthbench.pipeline.communicator import Communicator, Link
from depthbench.pipeline.edges import Edge, Local, Shares, edges
from depthbench.pipeline.flows import make_flows
from depthbench.pipeline.layout import Layout, layout
from depthbench.pipeline.ledger import Ledger, Traffic
from depthbench.pipeline.message import Label, MessageError
from depthbench.pipeline.order import Order, order, runs, schedule_table
from depthbench.pipeline.watchdog import Watchdog
from depthbench.residual import Shape, architecture
from tests.models import small_run

from .network import Group, Network, Work, calls, here

__all__ = ["calls"]  # a fixture

STAGES = range(2, 9)
VIRTUAL = range(1, 5)


# -- lists ------------------------------------------------------------------------------------------------------------
def groups(stages: int, count: int) -> list[int]:
    """Valid sizes of a group of microbatches: Megatron-Core refuses the others."""
    return [g for g in range(stages, count + 1) if count % g == 0 or count % g >= stages]


def sizes(stages: int) -> Iterator[tuple[int, int, int]]:
    """(chunks a stage, microbatches, group)."""
    for virtual in VIRTUAL:
        for count in range(stages, 3 * stages + 1):
            for group in groups(stages, count):
                yield virtual, count, group


def orders(stages: int, virtual: int, count: int, group: int, forward_only: bool) -> list[Order]:
    where = layout(stages * virtual, stages, virtual)
    return [order(where, stage, count, group, forward_only) for stage in range(stages)]


@pytest.mark.parametrize("stages", STAGES)
def test_the_table_is_megatrons(stages: int) -> None:
    """Also where a pass has fewer microbatches than a group."""
    for virtual, count, group in sizes(stages):
        assert schedule_table(count, virtual, group) == get_schedule_table(count, virtual, group)
        assert schedule_table(1, virtual, group) == get_schedule_table(1, virtual, group)


@pytest.mark.parametrize("stages", STAGES)
def test_what_a_stage_receives_is_what_its_neighbour_sends(stages: int) -> None:
    """The same labels in the same order at both ends of every link of the ring."""
    for virtual, count, group in sizes(stages):
        found = orders(stages, virtual, count, group, forward_only=False)
        for stage, following in zip(found, [*found[1:], found[0]], strict=True):
            assert following.receive_forward == stage.send_forward, (virtual, count, group)
            assert stage.receive_backward == following.send_backward, (virtual, count, group)


@pytest.mark.parametrize("stages", STAGES)
def test_every_edge_carries_every_microbatch_once_in_each_direction(stages: int) -> None:
    """From the stage of one chunk to that of the next; no gradients in a pass without them."""
    for virtual, count, group in sizes(stages):
        everything = [(chunk, m) for chunk in range(1, stages * virtual) for m in range(count)]
        for forward_only in (False, True):
            found = orders(stages, virtual, count, group, forward_only)
            for backward, kind in ((False, "forward"), (True, "backward")):
                sent = [(stage, label) for stage, one in enumerate(found) for label in getattr(one, f"send_{kind}")]
                for stage, label in sent:
                    chunk = label.receiver if backward else label.receiver - 1
                    assert label.backward is backward and chunk % stages == stage
                labels = sorted((label.receiver, label.microbatch) for _, label in sent)
                assert labels == ([] if backward and forward_only else everything)
                received = [label for one in found for label in getattr(one, f"receive_{kind}")]
                assert len(received) == len(sent)


# -- a model that knows what should come ------------------------------------------------------------------------------
Ran = dict[bool, list[tuple[int, int]]]
"""By backward: (chunk, microbatch) in the order in which a rank has run them."""


class Chunk(nn.Module):
    """A chunk whose messages are all 1000 m + c, for microbatch m and receiving chunk c; the loss of microbatch m
    counts m + 1 times. Checks what it gets, and notes what it runs."""

    def __init__(self, config: Any, number: int, virtual: int | None, sizes: list[int], ran: Ran) -> None:
        """sizes: elements of the message into each chunk, 0 for the first."""
        super().__init__()
        self.config, self.model_type, self.vp_stage = config, ModelType.encoder_or_decoder, virtual
        self.number, self.sizes, self.ran = number, sizes, ran
        self.decoder = ScheduleSeam()
        self.arrived: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self.arrived,) = tensors

    def forward(self) -> Tensor:
        microbatch, header = self.decoder.current_microbatch, message.header_elements(torch.float64)
        self.ran[False].append((self.number, microbatch))
        if self.number == 0:
            assert self.arrived is None
            values = torch.full((1,), 1000.0 * microbatch, dtype=torch.float64, requires_grad=True)
        else:
            assert self.arrived is not None
            values = self.arrived[header:]
            assert values.shape == (self.sizes[self.number],)
            assert torch.all(values == 1000 * microbatch + self.number), "not the message that the schedule runs"
        if torch.is_grad_enabled():
            values.register_hook(partial(self.check, microbatch))
        onward = values.mean() + 1
        if self.number == len(self.sizes) - 1:
            return onward
        return torch.cat([onward.new_empty(header), onward.expand(self.sizes[self.number + 1])])

    def check(self, microbatch: int, grad: Tensor) -> None:
        self.ran[True].append((self.number, microbatch))
        expected = torch.full_like(grad, (microbatch + 1) / len(grad))
        torch.testing.assert_close(grad, expected, msg="not the gradient that the schedule runs")


def forward_step(batches: Any, chunk: Chunk) -> tuple[Tensor, Any]:
    times = chunk.decoder.current_microbatch + 1
    return chunk(), lambda out: (out * times, torch.tensor(1, dtype=torch.int), float(out))


@dataclass(frozen=True)
class Pass:
    """overlap: Megatron-Core's overlap_p2p_comm. by_pair: see `Network`."""

    stages: int
    virtual: int
    count: int
    group: int
    overlap: bool = False
    forward_only: bool = False
    by_pair: bool = True


def as_is(stage: int, lists: Order) -> Order:
    return lists


def layout_of(one: Pass) -> Layout:
    return layout(one.stages * one.virtual, one.stages, one.virtual)


def edges_of(where: Layout) -> list[Edge]:
    """Full AttnRes', all of different sizes."""
    options = small_run("block_attnres", {"sublayers_per_block": 1}).residual
    return edges(architecture("block_attnres")(options, Shape(where.num_chunks, 1, 1, 1, 1)), where, cache=True)


LOCAL = Local(1, 1, 1, False)


def start(
    network: Network,
    stage: int,
    one: Pass,
    between: list[Edge],
    ledger: Ledger,
    spoil: Callable[[int, Order], Order] = as_is,
) -> Communicator:
    """This thread becomes a stage of the pass. spoil: changes the stage's lists."""
    here.network, here.me, here.made = network, stage, 0
    parallel = {"pipeline": one.stages, "virtual_pipeline": one.virtual, "distributed_optimizer": False}
    pipeline = {"overlap_p2p": one.overlap, "microbatch_group": one.group}
    config = megatron_config(small_run("pre_ln", parallel=parallel, pipeline=pipeline))
    config.finalize_model_grads_func = None
    pp_group: Any = Group(network, stage, one.stages, 0)
    link = Link(between, Shares(LOCAL), make_flows(pp_group, None), ledger, Watchdog(None, ""))
    lists = spoil(stage, order(layout_of(one), stage, one.count, one.group, one.forward_only))
    return Communicator(link, config, lists, 7, check_headers=True, pp_group=pp_group)


def run_schedule(one: Pass, spoil: Callable[[int, Order], Order] = as_is) -> None:
    """One pass on all ranks, through the schedule that Megatron-Core's `get_forward_backward_func` would choose. Checks
    what ran and what was sent."""
    where = layout_of(one)
    between = edges_of(where)
    elements = [0, *(LOCAL.numel(*edge.tensors) for edge in between)]
    network = Network(one.stages, one.by_pair)
    ran: list[Ran] = [{False: [], True: []} for _ in range(one.stages)]
    ledgers = [Ledger() for _ in range(one.stages)]
    losses: list[list[float]] = [[] for _ in range(one.stages)]

    def body(stage: int) -> None:
        communicator = start(network, stage, one, between, ledgers[stage], spoil)
        interleaved = one.virtual > 1
        chunks = [
            Chunk(communicator.config, number, virtual if interleaved else None, elements, ran[stage])
            for virtual, number in enumerate(where.chunks_of(stage))
        ]
        alone: Any = Group(network, 0, 1, -1)
        collection = ProcessGroupCollection()
        collection.tp, collection.cp, collection.dp_cp, collection.pp = alone, alone, alone, communicator.pp_group
        collection.embd = collection.pos_embd = None
        schedule = forward_backward_pipelining_without_interleaving
        if interleaved:
            schedule = forward_backward_pipelining_with_interleaving
        with torch.no_grad() if one.forward_only else nullcontext():
            losses[stage] = schedule(
                forward_step_func=forward_step,
                data_iterator=[None for _ in chunks] if interleaved else None,
                model=chunks if interleaved else chunks[0],
                num_microbatches=one.count,
                seq_length=1,
                micro_batch_size=1,
                forward_only=one.forward_only,
                p2p_communicator=communicator,
                pg_collection=collection,
            )
        communicator.finish()

    network.run([partial(body, stage) for stage in range(one.stages)])
    for stage in range(one.stages):
        assert ran[stage][False] == list(runs(where, stage, one.count, one.group)), one
        backward = [] if one.forward_only else list(runs(where, stage, one.count, one.group, backward=True))
        assert ran[stage][True] == backward, one
        assert losses[stage] == [1000 * m + where.num_chunks for m in range(one.count) if stage == one.stages - 1]
        sent = {(c, False) for c in range(1, where.num_chunks) if (c - 1) % one.stages == stage}
        if not one.forward_only:
            sent |= {(c, True) for c in range(1, where.num_chunks) if c % one.stages == stage}
        for (receiver, _), traffic in ledgers[stage].sent.items():
            times = one.count
            tensors = len(between[receiver - 1].tensors)
            assert traffic == Traffic(times, times * tensors, times * 8 * elements[receiver], times * 16), one
        assert set(ledgers[stage].sent) == sent, one


@pytest.mark.parametrize("virtual", VIRTUAL)
@pytest.mark.parametrize("stages", STAGES)
def test_megatrons_schedules_run_in_this_order_and_end(stages: int, virtual: int, calls: None) -> None:
    """Numbers of microbatches and groups drawn at random, with and without gradients and (for many stages: or)
    overlap."""
    draw = random.Random(10 * stages + virtual)
    most = (3 if stages < 5 else 2) * stages
    options = [(count, group) for v, count, group in sizes(stages) if v == virtual and count <= most]
    both = (False, True) if stages < 6 else ((stages + virtual) % 2 == 0,)
    for overlap in both if virtual > 1 else (False,):
        for forward_only in (False, True):
            run_schedule(Pass(stages, virtual, *draw.choice(options), overlap, forward_only))


@pytest.mark.parametrize("virtual", VIRTUAL[:3])
@pytest.mark.parametrize("stages", STAGES)
def test_no_deadlock_where_a_groups_messages_all_go_one_after_the_other(stages: int, virtual: int, calls: None) -> None:
    """So does NCCL in groups made after `init_process_group(device_id=...)`, which starts them beforehand; isend and
    irecv that are not batched then share one queue a group and process, whoever the peer is."""
    draw = random.Random(stages)
    options = [(count, group) for v, count, group in sizes(stages) if v == virtual and count <= 2 * stages]
    for overlap in (False, True) if virtual > 1 else (False,):
        run_schedule(Pass(stages, virtual, *draw.choice(options), overlap, by_pair=False))


def test_two_stages_with_interleaving_would_wait_for_each_other_in_one_group(
    calls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why neighbours send through different groups: here both neighbours are the same process."""
    monkeypatch.setattr(communicator, "colour", lambda sender, stages: 0)
    with pytest.raises(RuntimeError, match="forward message of microbatch 0, chunk 1 to 2 failed: deadlock"):
        run_schedule(Pass(2, 2, 4, 2))


@pytest.mark.parametrize("stages", [3, 4, 5])
def test_stages_in_a_ring_would_wait_for_each_other_in_one_group(
    calls: None, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    """Where a group's messages go one after the other, each stage's receive is behind its send, all round the ring."""
    monkeypatch.setattr(communicator, "colour", lambda sender, stages: 0)
    with pytest.raises(RuntimeError, match="failed: deadlock"):
        run_schedule(Pass(stages, 2, 2 * stages, stages, by_pair=False))


def test_with_overlap_nothing_waits_but_the_handles(calls: None) -> None:
    """A send and a receive are under way when the call comes back; a sent tensor may be freed at once."""
    one = Pass(2, 2, 2, 2, overlap=True)
    between, network = edges_of(layout_of(one)), Network(1)
    incoming, outgoing, taken = (
        torch.full((2 + LOCAL.numel(*edge.tensors),), value, dtype=torch.float64)
        for edge, value in ((between[0], 5.0), (between[1], 6.0), (between[1], torch.nan))
    )
    with network.turn:
        stage = start(network, 1, one, between, Ledger())
        arrived, handles = stage.send_forward_recv_forward(outgoing, True, None, overlap_p2p_comm=True)
        outgoing.data = torch.empty(1, dtype=torch.float64)
        works: dict[str, Work] = {name: handle.work for name, handle in handles.items()}
        assert works.keys() == {"send_next", "recv_prev"} and not any(work.done for work in works.values())
        # stage 0 comes to its ends
        message.write_header(incoming, Label(False, 1, 0), 7)
        network.post(replace(works["recv_prev"].group, me=0), 1, incoming, send=True)
        network.post(replace(works["send_next"].group, me=0), 1, taken, send=False)
        handles["recv_prev"].wait()
        handles["send_next"].wait()
    message.check_header(taken, Label(False, 2, 0), 7)
    assert torch.all(arrived[2:] == 5) and torch.all(taken[2:] == 6)


# -- what goes wrong ends with a message ------------------------------------------------------------------------------
def test_a_message_out_of_order_is_found_by_its_header(calls: None) -> None:
    """A stage that expects two microbatches of one edge the other way round says which two."""

    def swap(stage: int, lists: Order) -> Order:
        swapped = [lists.receive_forward[1], lists.receive_forward[0]] if stage == 1 else []
        return replace(lists, receive_forward=[*swapped, *lists.receive_forward[len(swapped) :]])

    with pytest.raises(MessageError) as caught:
        run_schedule(Pass(3, 1, 4, 3), swap)
    expected, _, received = str(caught.value).partition(", received ")
    assert "forward message of microbatch 1, chunk 0 to 1 of pass 7" in expected
    assert "forward message of microbatch 0, chunk 0 to 1 of pass 7" in received


def test_a_message_of_another_edge_has_another_size(calls: None) -> None:
    """Both sizes are named, before anything is sent."""

    def swap(stage: int, lists: Order) -> Order:
        return replace(lists, send_forward=lists.send_forward[::-1]) if stage == 0 else lists

    with pytest.raises(AssertionError, match=r"chunk 3 to 4 has 3 elements, its edge 4"):
        run_schedule(Pass(3, 2, 3, 3), swap)


def test_messages_that_were_never_sent_are_named(calls: None) -> None:
    """A pass must use up its lists."""

    def longer(stage: int, lists: Order) -> Order:
        extra = replace(lists.send_forward[-1], microbatch=9) if stage == 0 else None
        return replace(lists, send_forward=[*lists.send_forward, extra]) if extra else lists

    with pytest.raises(AssertionError, match=r"never sent or received: forward message of microbatch 9, chunk 0 to 1"):
        run_schedule(Pass(2, 1, 2, 2), longer)
