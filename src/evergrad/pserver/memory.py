"""How much memory this process has left of what it may use."""

import os
from collections.abc import Callable
from pathlib import Path

from evergrad.errors import ConfigError

LEAST_ROOM_BYTES = 64 << 20
_STATM = Path("/proc/self/statm")

Room = Callable[[], float]
"""Bytes that may still be taken."""


def room_within(limit_bytes: int) -> Room:
    """The room left of a limit, by what the system counts as this process's resident memory.

    Raises:
        ConfigError: the process itself takes nearly all of it.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE")

    def room() -> float:
        resident_pages = int(_STATM.read_text().split()[1])
        return float(limit_bytes - resident_pages * page_bytes)

    if room() < LEAST_ROOM_BYTES:
        taken = (limit_bytes - room() + LEAST_ROOM_BYTES) / (1 << 20)
        raise ConfigError(f"--memory: a pserver itself takes nearly all of that; give at least {taken:.0f}M")
    return room
