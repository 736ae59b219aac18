"""Tasks on their way from todo over pending to done.

A task may be handed out more than once; every handing-out is an attempt with a number of its own, and the first
attempt reported done is the one that counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from evergrad.messages import Attempt, Member, Term


@dataclass(slots=True)
class AttemptNumbers:
    """Numbers attempts so that no two of a term are alike, and none like those of another master."""

    term: Term
    _last: int = 0

    def next(self) -> Attempt:
        """A number never given before."""
        self._last += 1
        return Attempt(self.term, self._last)


@dataclass(slots=True)
class _Pending:
    open: dict[Attempt, tuple[Member, float]] = field(default_factory=dict)
    handed_out: set[Attempt] = field(default_factory=set)
    failures: int = 0


class TaskPool:
    """Some tasks, known by their index.

    Invariants:
    1. A task is todo, pending (it has an open attempt) or done.
    2. A member has at most one open attempt.
    3. An attempt given up (its member died or asked anew) may still be reported done, and then counts: what it
       pushed is held by every pserver, whoever lives.

    Args:
        indices: the tasks.
        numbers: numbers attempts.
        owners: whom a task belonged to before; None if tasks belong to nobody.

    Cost: some hundred bytes a task that is pending or was given back; with owners, of every task.
    """

    def __init__(self, indices: Sequence[int], numbers: AttemptNumbers, owners: Mapping[int, Member] | None) -> None:
        self._numbers = numbers
        self._owners = {} if owners is None else owners
        self._put_by: dict[Member, int] = {}
        self._fresh = iter(indices if owners is None else ())
        self._fresh_left = len(indices) if owners is None else 0
        self._todo: dict[int, None] = {} if owners is None else dict.fromkeys(indices)
        self._tasks: dict[int, _Pending] = {}
        self._index_of: dict[Attempt, int] = {}
        self.done = 0

    def hand_out(self, member: Member, now: float, backup_after_s: float | None) -> tuple[int, Attempt] | None:
        """An attempt for a member that holds none; None if there is nothing for it.

        Of the task that is put by for it, else of one it owned before, else of one nobody owns, else of any todo, else
        a second one of a task pending for longer than `backup_after_s` (None: never).
        """
        index = self._take(member, now, backup_after_s)
        if index is None:
            return None
        self._todo.pop(index, None)
        attempt = self._numbers.next()
        task = self._tasks.setdefault(index, _Pending())
        task.open[attempt] = (member, now)
        task.handed_out.add(attempt)
        self._index_of[attempt] = index
        return index, attempt

    def put_by(self, member: Member) -> int | None:
        """A task nobody has had, for this member to get next; others get it when there is nothing else. None: none."""
        if not self._fresh_left:
            return None
        index = self._put_by[member] = self._take_fresh()
        self._todo[index] = None
        return index

    def finish(self, attempt: Attempt) -> tuple[int, float | None] | None:
        """An attempt is reported done.

        Returns:
            None if it is not one of a task that was still to be done; else the task, and when the attempt was handed
            out (None if it had been given up).
        """
        index = self._index_of.get(attempt)
        if index is None:
            return None
        task = self._tasks.pop(index)
        self._todo.pop(index, None)
        self.done += 1
        for other in task.handed_out:
            del self._index_of[other]
        return index, task.open[attempt][1] if attempt in task.open else None

    def release(self, member: Member) -> None:
        """Give up what a member holds; a task without another open attempt goes back to todo."""
        for index, task in self._tasks.items():
            held = [attempt for attempt, (holder, _) in task.open.items() if holder == member]
            for attempt in held:
                del task.open[attempt]
            if held and not task.open:
                self._todo[index] = None

    def fail(self, attempt: Attempt) -> tuple[int, int] | None:
        """An attempt has failed and can no more be reported done; the task goes back to todo, as with `release`.

        Returns:
            None if it is not one of a task that was still to be done; else the task, and how many of its attempts have
            failed.
        """
        index = self._index_of.pop(attempt, None)
        if index is None:
            return None
        task = self._tasks[index]
        task.failures += 1
        task.handed_out.remove(attempt)
        task.open.pop(attempt, None)
        if not task.open:
            self._todo[index] = None
        return index, task.failures

    def set_aside(self, index: int) -> None:
        """No attempt of this task, todo or pending, counts any more; it is as good as done."""
        task = self._tasks.pop(index)
        self._todo.pop(index, None)
        self.done += 1
        for attempt in task.handed_out:
            del self._index_of[attempt]

    def excuse(self, seconds: float, now: float) -> None:
        """For so long until now nobody could report anything: what is pending is that much younger."""
        for task in self._tasks.values():
            task.open = {a: (member, min(since + seconds, now)) for a, (member, since) in task.open.items()}

    def left(self) -> set[int]:
        """The tasks that have been handed out and are not done. Cost: one step for each."""
        return set(self._tasks)

    def has_fresh(self) -> bool:
        """Whether there is a task that was never handed out."""
        return bool(self._fresh_left) or any(index not in self._tasks for index in self._todo)

    def is_known(self, attempt: Attempt) -> bool:
        """Whether this attempt, open or given up, counts if it is reported done."""
        return attempt in self._index_of

    def holds(self, member: Member, attempt: Attempt) -> bool:
        """Whether this is an open attempt of this member's."""
        index = self._index_of.get(attempt)
        return index is not None and self._tasks[index].open.get(attempt, ("", 0.0))[0] == member

    def all_done(self) -> bool:
        """Whether nothing is todo or pending."""
        return not self._fresh_left and not self._todo and not self._tasks

    def pending(self) -> dict[int, tuple[Member, float]]:
        """Who holds each pending task, and since when (its oldest open attempt)."""
        return {i: min(t.open.values(), key=lambda held: held[1]) for i, t in self._tasks.items() if t.open}

    def _take(self, member: Member, now: float, backup_after_s: float | None) -> int | None:
        mine = self._put_by.pop(member, None)
        if mine in self._todo:
            return mine
        others = set(self._put_by.values())
        own = (i for i, owner in self._owners.items() if owner == member and i in self._todo)
        nobodys = (i for i in self._todo if i not in self._owners and i not in others)
        index = next(chain(own, nobodys), None)
        if index is None and self._fresh_left:
            index = self._take_fresh()
        if index is None:
            index = next(iter(self._todo), None)
        if index is not None or backup_after_s is None:
            return index
        overdue = (i for i, (_, since) in self.pending().items() if now - since > backup_after_s)
        return next((i for i in overdue if len(self._tasks[i].open) == 1), None)

    def _take_fresh(self) -> int:
        self._fresh_left -= 1
        return next(self._fresh)
