"""How far the tasks of an asynchronous epoch are on a pserver, and batches that wait until they may be applied."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from evergrad.messages import Progress, PushBatch, Standing

ALL_BATCHES = 2**62
"""How many batches of a task are applied whose epoch has passed: all."""
MOST_WAITING = 64
"""Batches that wait here at most; those beyond are left to be sent again."""


class Standpoint(NamedTuple):
    """How far the tasks of an epoch are: task -> how many of its batches."""

    epoch: int
    batches: dict[int, int]

    def of(self, epoch: int, task: int) -> int:
        """Batches of a task. An epoch begins only when the one before is over."""
        if epoch < self.epoch:
            return ALL_BATCHES
        return self.batches.get(task, 0) if epoch == self.epoch else 0

    def is_beyond(self, other: "Standpoint") -> bool:
        """Whether any task is further here than in the other."""
        if self.epoch != other.epoch:
            return self.epoch > other.epoch
        return any(batches > other.batches.get(task, 0) for task, batches in self.batches.items())

    def has_reached(self, other: "Standpoint") -> bool:
        """Whether every task is at least as far here."""
        return not other.is_beyond(self)


class Waiting(NamedTuple):
    """A whole batch, and who sent it."""

    src: str
    push: PushBatch


class Batches:
    """The batches of the present epoch, each applied once and in order within its task."""

    def __init__(self) -> None:
        self.at = Standpoint(0, {})
        self._waiting: dict[tuple[str, int, int, int], PushBatch] = {}

    @property
    def standing(self) -> Standing:
        """How far the tasks of the present epoch are."""
        return tuple(sorted(self.at.batches.items()))

    def restore(self, progress: Progress) -> None:
        """Stand where a checkpoint stood."""
        epoch = progress.epoch + 1 if progress.is_closed else max(progress.epoch, 0)
        self.at = Standpoint(epoch, {} if progress.is_closed else dict(progress.standing))

    def has_reached(self, target: Standpoint) -> bool:
        """Whether all batches up to there are applied."""
        return self.at.has_reached(target)

    def begin(self, epoch: int) -> bool:
        """An epoch has begun, if it is a later one than the present; returns whether it is."""
        if epoch <= self.at.epoch:
            return False
        self.at = Standpoint(epoch, {})
        return True

    def note(self, push: PushBatch) -> None:
        """A batch of the present epoch, the next of its task, is applied."""
        self.at.batches[push.task] = push.batch + push.batches

    def can_wait(self, src: str, push: PushBatch) -> bool:
        """Whether there is room for a batch that does not wait yet."""
        return _known_by(src, push) not in self._waiting and len(self._waiting) < MOST_WAITING

    def wait(self, src: str, push: PushBatch) -> None:
        """Keep a whole batch until it may be applied."""
        self._waiting[_known_by(src, push)] = push

    def ready(self, may_apply: Callable[[PushBatch], bool]) -> Iterator[Waiting]:
        """Those waiting batches that may be applied, in the order in which they came; they wait no more."""
        for key, push in list(self._waiting.items()):
            if may_apply(push):
                del self._waiting[key]
                yield Waiting(key[0], push)


def _known_by(src: str, push: PushBatch) -> tuple[str, int, int, int]:
    return src, push.epoch, push.task, push.batch
