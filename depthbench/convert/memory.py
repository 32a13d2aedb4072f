"""Memory that was freed, given back to the system."""

import ctypes
import sys


def give_back() -> None:
    """glibc keeps freed blocks of up to 32 MB for later, which between tensors of a model adds up to gigabytes."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
