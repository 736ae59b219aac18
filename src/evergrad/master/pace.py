"""Bounded staleness: who may begin another batch, and who waits for whom."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from evergrad.messages import Attempt, Member


class Behind(NamedTuple):
    """The trainer that is waited for, and how many batches more the one that waits has done."""

    member: Member
    batches: int


@dataclass(slots=True)
class _Held:
    """A task that a trainer holds; `before` and `begun`: batches it had begun when it got it, and by now."""

    attempt: Attempt
    before: int
    begun: int


class Pace:
    """How many batches of an epoch each trainer has done, as far as it has told.

    A trainer may begin a batch when it has done at most `most` batches more than the slowest of those that hold a task.
    A batch is done when the script is through with it; its push may still be on its way.

    Invariants:
    1. One that gets a task counts from the slowest's number on if its own is lower. So `_least`, the lowest number of
       those that hold a task, never falls, and one that joins, or had nothing to do for a while, holds nobody up.
    2. One that gets its next task right after the last has held one all the time: else every slow trainer would be as
       far as the others with each new task.
    3. The slowest that holds a task never waits, so somebody always goes on.

    Cost: a number for each trainer that holds a task or was ahead of one that does; a step for each with a call.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = 0
        self._done: dict[Member, int] = {}
        self._held: dict[Member, _Held] = {}
        self._released: set[Member] = set()
        self._is_settled = True

    def take(self, member: Member, attempt: Attempt) -> None:
        """A trainer gets a task."""
        self._released.discard(member)
        before = max(self._done.get(member, 0), self._least)
        self._done[member] = before
        self._held[member] = _Held(attempt, before, before)
        self._raise()

    def may_begin(self, member: Member, batches: int) -> bool:
        """Whether a trainer that has done so many batches of the task it holds may begin another."""
        held = self._held[member]
        self._done[member] = max(self._done[member], held.before + batches)
        self._raise()
        if self._done[member] - self._least > self._most:
            return False
        held.begun = max(held.begun, held.before + batches + 1)
        return True

    def finish(self, attempt: Attempt) -> None:
        """An attempt has done all its batches."""
        for member, held in self._held.items():
            if held.attempt == attempt:
                self._done[member] = held.begun
        self._raise()

    def release(self, member: Member) -> None:
        """A trainer gives its task up, or has done it; `settle` tells whether it has got another."""
        if member in self._held:
            self._released.add(member)
            self._is_settled = False

    def unsettle(self) -> None:
        """Attempts that are held may count no more."""
        self._is_settled = False

    def settle(self, holds: Callable[[Member, Attempt], bool]) -> None:
        """Whoever waits for a task has got one if there is any: all others have none.

        Args:
            holds: whether this attempt is one that its holder can still bring to an end.
        """
        if self._is_settled:
            return
        self._is_settled = True
        void = {member for member, held in self._held.items() if not holds(member, held.attempt)}
        for member in self._released | void:
            del self._held[member]
        self._released.clear()
        self._raise()

    def behind(self, member: Member) -> Behind | None:
        """The slowest, as one that holds a task sees it; None if it holds none."""
        if member not in self._held:
            return None
        slowest = min(self._held, key=lambda other: self._done[other])
        return Behind(slowest, self._done[member] - self._done[slowest])

    def _raise(self) -> None:
        """Let `_least` rise; numbers that it has reached say nothing any more."""
        least = min((self._done[member] for member in self._held), default=self._least)
        if least > self._least:
            self._least = least
            self._done = {m: n for m, n in self._done.items() if m in self._held or n > least}
