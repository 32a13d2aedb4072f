"""Which signals end a run in order, and how the helper processes of a rank live through them.

A scheduler signals every process of a job step. The trainer then needs its data loaders and its checkpoint writer for
one more save, so these ignore the signals and end when the trainer does.
"""

import ctypes
import signal
import sys

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def ignore_stop_signals(*args: object) -> None:
    """To be called in a helper process; takes and ignores what its starter passes."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


def serve_until_parent_ends() -> None:
    """`ignore_stop_signals`, for a helper that would outlive a killed parent: on Linux the kernel then ends it too."""
    ignore_stop_signals()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
