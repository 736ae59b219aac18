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
    2. The slowest that holds a task never waits, so somebody always goes on.

    Cost: a number for each trainer that holds a task or is ahead of one that does; a step for each with every call.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = 0
        self._done: dict[Member, int] = {}
        self._held: dict[Member, _Held] = {}

    def take(self, member: Member, attempt: Attempt) -> None:
        """A trainer gets a task."""
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
        """A trainer holds no task any more."""
        if self._held.pop(member, None) is not None:
            self._raise()

    def release_but(self, holds: Callable[[Member, Attempt], bool]) -> None:
        """A task is not to be done any more: only those hold one of whom this is true."""
        for member, held in list(self._held.items()):
            if not holds(member, held.attempt):
                self.release(member)

    def behind(self, member: Member) -> Behind | None:
        """The slowest, as one that holds a task sees it; None if it holds none."""
        if member not in self._held:
            return None
        slowest = min(self._held, key=lambda other: self._done[other])
        return Behind(slowest, self._done[member] - self._done[slowest])

    def _raise(self) -> None:
        if self._held:
            self._least = min(self._done[member] for member in self._held)
            self._done = {m: n for m, n in self._done.items() if m in self._held or n > self._least}
