"""Process groups for messages between stages.

Megatron-Core sends forward and backward messages through one group. Where the previous and the next stage are the same
process (two stages with interleaving), they can then be taken for each other (silently: their shapes are equal). And
NCCL runs what a process sends and receives in one group one after the other: around the ring of stages each could wait
for the next one to receive. Here every direction has groups of its own, and in each of them a process has one
neighbour only, to which it sends or from which it receives, in the order in which messages are sent.
"""

from datetime import timedelta

import torch.distributed as dist

from depthbench.parallel.startup import LONGER_THAN_THE_WATCHDOG

Flows = dict[tuple[bool, int], dist.ProcessGroup]
"""(backward, colour of the sending stage) -> group."""

_FOR_EVER = timedelta(days=365)


def colour(sender: int, stages: int) -> int:
    """Neighbours on the ring of stages send through groups of different colours: two do, or three if they are odd."""
    return 2 if stages % 2 and sender == stages - 1 else sender % 2


def make_flows(pipeline_group: dist.ProcessGroup, timeout: float | None) -> Flows:
    """A collective call of the whole world, which every process makes for its own pipeline. timeout: the watchdog's."""
    limit = _FOR_EVER if timeout is None else timedelta(seconds=LONGER_THAN_THE_WATCHDOG * timeout)
    mine = tuple(dist.get_process_group_ranks(pipeline_group))
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    colours = sorted({colour(sender, len(mine)) for sender in range(len(mine))})
    flows: Flows = {}
    for ranks in sorted(set(everyone)):
        for backward in (False, True):
            for number in colours:
                group = dist.new_group(list(ranks), timeout=limit)
                if ranks == mine:
                    flows[backward, number] = group
    return flows
