"""What a simulation asks of the machine."""

import ctypes
import sys

PR_SET_THP_DISABLE = 41


def huge_pages(are_used: bool) -> None:
    """Whether memory may come in huge pages.

    For a table of three rows two megabytes would be cleared for each of its arrays, which takes longer than the rest.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, int(not are_used), 0, 0, 0)
