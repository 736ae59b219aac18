"""What is written of a master's facts, and what must wait until it is."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from evergrad.master.errands import PutRecord
from evergrad.master.record import Record


class Facts(NamedTuple):
    """What the record says, in short: what answers to asks wait for, what commits wait for, and the rest."""

    awaited: Hashable
    lost: Hashable
    others: Hashable


class Recording:
    """Writes the record when facts have changed; one writing is under way at a time.

    Args:
        is_kept: whether there is a store at all; without one everything counts as written.
    """

    def __init__(self, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._written: Facts | None = None
        self._writing: tuple[int, Facts] | None = None
        self._number = 0

    def write(self, facts: Facts, make: Callable[[], Record]) -> PutRecord | None:
        """What is to be written, if anything is and nothing is being written."""
        if not self._is_kept or self._writing is not None or facts == self._written:
            return None
        self._number += 1
        self._writing = self._number, facts
        return PutRecord(self._number, make())

    def put(self, number: int) -> None:
        """It is written."""
        if self._writing is not None and self._writing[0] == number:
            self._written, self._writing = self._writing[1], None

    def has(self, facts: Facts) -> bool:
        """Whether these facts were written last."""
        return not self._is_kept or self._written == facts

    def has_awaited(self, facts: Facts) -> bool:
        """Whether those were that answers to asks wait for."""
        return not self._is_kept or (self._written is not None and self._written.awaited == facts.awaited)

    def has_lost(self, facts: Facts) -> bool:
        """Whether those were that commits wait for."""
        return not self._is_kept or (self._written is not None and self._written.lost == facts.lost)
