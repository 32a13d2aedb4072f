"""Process groups for messages between stages.

Megatron-Core sends forward and backward messages through one group. Where the previous and the next stage are the same
process (two stages with interleaving), they can then be taken for each other (silently: their shapes are equal), and
with NCCL, which keeps all messages between two processes in one order, they can wait for each other. Here each
direction has a group of its own, and with two stages each direction and sender, so that a group carries messages one
way between any two processes, in the order in which they are sent.
"""

import torch.distributed as dist

Flows = dict[tuple[bool, int], dist.ProcessGroup]
"""(backward, sending stage mod 2) -> group; the stage counts only where there are two."""


def make_flows(pipeline_group: dist.ProcessGroup) -> Flows:
    """A collective call of the whole world, which every process makes for its own pipeline."""
    mine = tuple(dist.get_process_group_ranks(pipeline_group))
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    senders = (0, 1) if len(mine) == 2 else (0,)
    flows: Flows = {}
    for ranks in sorted(set(everyone)):
        for backward in (False, True):
            for sender in senders:
                group = dist.new_group(list(ranks))
                if ranks == mine:
                    flows[backward, sender] = group
    return flows


def flow(flows: Flows, backward: bool, sender: int) -> dist.ProcessGroup:
    return flows[backward, sender % 2 if len(flows) == 4 else 0]
