"""What is written of a master's facts, and what must wait until it is."""

from collections.abc import Callable, Hashable

from evergrad.master.errands import PutRecord
from evergrad.master.record import Record


class Recording:
    """Writes the record when facts have changed; one writing is under way at a time.

    Args:
        is_kept: whether there is a store at all; without one everything counts as written.
    """

    def __init__(self, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._written: Hashable = None
        self._writing: tuple[int, Hashable] | None = None
        self._number = 0

    def write(self, facts: Hashable, make: Callable[[], Record]) -> PutRecord | None:
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

    def has(self, facts: Hashable, part: int) -> bool:
        """Whether this part of the facts is what was written last."""
        if not self._is_kept:
            return True
        return isinstance(self._written, tuple) and isinstance(facts, tuple) and self._written[part] == facts[part]
