"""A stage's end of the pipeline: what it keeps between passes, and the communicator of each pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from depthbench.residual import Residual

from .boundary import Boundary, boundaries
from .cache import HistoryCache
from .communicator import Communicator, Link
from .edges import Local, Shares, edges
from .flows import make_flows
from .layout import Layout
from .ledger import Ledger
from .order import order
from .watchdog import Watchdog


@dataclass(frozen=True)
class TransportOptions:
    """history_cache: False sends all history over every edge. group: microbatches a chunk runs before the next one.
    timeout: seconds to wait for a message. check_headers: read each message's header (on a GPU that is a wait)."""

    history_cache: bool
    group: int
    timeout: float | None
    check_headers: bool


class Transport:
    """Built by all processes together."""

    def __init__(
        self,
        residual: Residual,
        layout: Layout,
        local: Local,
        config: Any,
        pp_group: dist.ProcessGroup,
        options: TransportOptions,
    ) -> None:
        self.layout, self.config, self.pp_group, self.options = layout, config, pp_group, options
        self.stage = pp_group.rank()
        self.cache = HistoryCache()
        self.ledger = Ledger()
        self.watchdog = Watchdog(options.timeout, f"rank {dist.get_rank()}, pipeline stage {self.stage}")
        between = edges(residual, layout, options.history_cache)
        self.shares = Shares(local)
        self.link = Link(between, self.shares, make_flows(pp_group, options.timeout), self.ledger, self.watchdog)
        self.boundaries: list[Boundary] = boundaries(
            residual, layout, self.stage, self.shares, options.history_cache, self.cache
        )
        self.make_communicator: Callable[..., Communicator] = Communicator  # a recording has one of its own
        self.passes = 0
        self.interrupted = False

    @contextmanager
    def communicate(
        self, num_microbatches: int, forward_only: bool, own: Sequence[Local] = ()
    ) -> Iterator[Communicator]:
        """The communicator of one pass over `num_microbatches`; own: what this rank holds of each, where not the usual.
        Leaves the ledger and the cache's peak to be read.

        After a pass that an exception has ended on every process, the next one starts clean: nothing is left in the
        cache, and messages that were on their way end with their process groups, which others replace. (On a GPU a
        message that never comes holds up the stream that waits for it; there the watchdog ends the process.)
        """
        if self.interrupted:
            replaced = self.link.flows.values()
            self.link = replace(self.link, flows=make_flows(self.pp_group, self.options.timeout))
            for group in replaced:  # only now have all processes left the pass
                dist.destroy_process_group(group)
            self.interrupted = False
        self.shares.own = own
        self.cache.clear()
        self.ledger.clear()
        self.passes += 1
        steps = order(self.layout, self.stage, num_microbatches, self.options.group, forward_only)
        communicator = self.make_communicator(
            self.link,
            self.config,
            steps,
            self.passes,
            check_headers=self.options.check_headers,
            pp_group=self.pp_group,
        )
        try:
            yield communicator
            communicator.finish()
            self.cache.assert_empty()
        except BaseException:
            self.interrupted = True
            raise
