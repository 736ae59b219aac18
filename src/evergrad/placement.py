"""Which pserver holds what: slots for table rows, ranges for dense parameters.

A slot is one of `SLOTS` fixed sets of keys; which slot a key falls in never depends on the number of pservers
(`kernels/hashing.py: slots_of`). Pserver *i* of *n* owns the contiguous slots and the contiguous elements given here.
"""

SLOTS = 16_384


def slots_owned(place: int, places: int) -> range:
    """The slots that pserver `place` of `places` owns; empty only when there are more pservers than slots."""
    return range(SLOTS * place // places, SLOTS * (place + 1) // places)


def span_owned(size: int, place: int, places: int) -> range:
    """The elements of a flat dense group of `size` elements that pserver `place` of `places` owns; may be empty."""
    return range(size * place // places, size * (place + 1) // places)
