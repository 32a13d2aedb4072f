"""Which signals end a run in order, and how the helper processes of a rank live through them.

A scheduler signals every process of a job step. The trainer then needs its data loaders and its checkpoint writer for
one more save, so these ignore the signals and end when the trainer does.
"""

import signal

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def ignore_stop_signals(*args: object) -> None:
    """To be called in a helper process; takes and ignores what its starter passes."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
