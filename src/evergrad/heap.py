"""How the C library keeps memory that was freed.

As it comes, glibc gives arrays of some megabytes back to the system as soon as they are freed. A process that makes the
same arrays for every batch then gets them anew page by page, each page zeroed: some 1,500 faults, three milliseconds a
batch of the click model in `benchmarks/`.
"""

import ctypes
from contextlib import suppress

KEPT_BYTES = 256 << 20
"""So much freed memory a process keeps at most, besides what lies between memory in use."""
LARGEST_BYTES = 64 << 20
"""An array larger than this is given back at once all the same."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h


def keep_freed_memory() -> None:
    """Have this process keep freed memory for what it allocates next; does nothing where the C library is not glibc."""
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, LARGEST_BYTES)
