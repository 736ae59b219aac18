"""What stands in an entry of a table's index beside its key: nothing, the number of a row, or a candidate.

A candidate, a key met that has no row yet, keeps there the step it was last met in and the number of steps it was met
in (`kernels/policy.py`).
"""

import numpy as np

from evergrad.kernels.jit import inline

Integer = int | np.int64

EMPTY = -1
MOST_COUNT = 2**31 - 1
"""Counts stop here."""


@inline
def as_candidate(last: Integer, count: Integer) -> Integer:
    """What stands for a candidate: below EMPTY."""
    return EMPTY - 1 - ((count << 31) | last)


@inline
def last_of(candidate: Integer) -> Integer:
    """The step in which it was last met."""
    return (EMPTY - 1 - candidate) & MOST_COUNT


@inline
def count_of(candidate: Integer) -> Integer:
    """In how many steps it was met."""
    return (EMPTY - 1 - candidate) >> 31
