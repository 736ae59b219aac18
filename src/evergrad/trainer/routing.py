"""Which of some keys go to which pserver, and their rows back in the order of the keys."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.hashing import slots_of
from evergrad.messages import Floats, Keys


class Routed:
    """Keys by place.

    The order of the keys themselves does not depend on the number of places, so nothing computed with them does.
    """

    def __init__(self, keys: Keys, of_place: list[NDArray[np.intp]] | None) -> None:
        self._keys = keys
        self._of_place = of_place

    def keys(self, place: int) -> Keys:
        """The keys that a place owns."""
        return self._keys if self._of_place is None else self._keys[self._of_place[place]]

    def rows(self, rows: Floats, place: int) -> Floats:
        """Of one row per key, those of the keys that a place owns."""
        return rows if self._of_place is None else rows[self._of_place[place]]

    def gather(self, parts: Sequence[Floats]) -> Floats:
        """One row per key, from those of each place."""
        if self._of_place is None:
            return parts[0]
        rows = np.empty((self._keys.size, parts[0].shape[1]), np.float32)
        for index, part in zip(self._of_place, parts, strict=True):
            rows[index] = part
        return rows


def route(keys: Keys, place_of_slot: NDArray[np.uint16], places: int) -> Routed:
    """Sort keys by the place that owns them."""
    if places == 1:
        return Routed(keys, None)
    owners = place_of_slot[slots_of(keys)]
    return Routed(keys, [np.flatnonzero(owners == place) for place in range(places)])
