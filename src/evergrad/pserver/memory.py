"""How much memory this process has left of what it may use."""

import os
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")

Room = Callable[[], float]
"""Bytes that may still be taken."""


def room_within(limit_bytes: int) -> Room:
    """The room left of a limit, by what the system counts as this process's resident memory."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")

    def room() -> float:
        resident_pages = int(_STATM.read_text().split()[1])
        return float(limit_bytes - resident_pages * page_bytes)

    return room
