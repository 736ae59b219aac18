"""An epoch of training under each update rule: which tasks there are, and when it is over.

A round of `LocalSGD` is a step of `Sync` whose tasks are of several batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from evergrad.master.dispatch import AttemptNumbers, TaskPool
from evergrad.messages import (
    AsyncTask,
    Attempt,
    DataSpec,
    Generation,
    Member,
    Request,
    SyncTask,
    Term,
    TrainDone,
    UpdateSpec,
)
from evergrad.schedule import async_task, async_tasks, sync_steps, sync_task

BACKUP_MULTIPLE = 8.0
"""A task pending for so many times the average goes to a spare trainer too ..."""
BACKUP_MIN_S = 1.0
"""... but not before so many seconds ..."""
BACKUP_MEASURED = 10
"""... and not before so many steps' worth of tasks have been measured."""
AVERAGE_WEIGHT = 0.1


class Now(NamedTuple):
    """The time, and what a task's message says of its master."""

    time_s: float
    request: Request
    term: Term
    generation: Generation


class Patience:
    """How long a task may be pending before it is handed out again."""

    def __init__(self, fixed_s: float | None, tasks_of_a_step: int) -> None:
        self._fixed_s = fixed_s
        self._needed = BACKUP_MEASURED * tasks_of_a_step
        self._measured = 0
        self._average_s = 0.0

    def measure(self, seconds: float) -> None:
        """A task took so long."""
        self._measured += 1
        weight = max(AVERAGE_WEIGHT, 1 / self._measured)
        self._average_s += weight * (seconds - self._average_s)

    def backup_after_s(self) -> float | None:
        """After so many seconds pending a task goes to a spare trainer too; None: never (yet)."""
        if self._fixed_s is not None:
            return self._fixed_s
        return max(BACKUP_MIN_S, BACKUP_MULTIPLE * self._average_s) if self._measured >= self._needed else None


class Epoch(ABC):
    """The tasks of one epoch.

    Args:
        number: of the epoch.
        data: what it goes over.
        steps: how many steps (or, in `Async`, tasks) it has.
        patience: how long a task may be pending.
    """

    _pool: TaskPool

    def __init__(self, number: int, data: DataSpec, steps: int, patience: Patience) -> None:
        self.number, self.data = number, data
        self.step, self.steps = 0, steps
        self.is_closed = steps == 0
        self._patience = patience

    @abstractmethod
    def hand_out(self, member: Member, now: Now) -> SyncTask | AsyncTask | None:
        """A task for this member, or None while there is none for it."""

    @abstractmethod
    def finish(self, done: TrainDone, now_s: float) -> int:
        """A task is reported done; returns how many samples count as trained by it: 0 if it counts no more."""

    @property
    @abstractmethod
    def batches(self) -> int:
        """How many batches, one after the other, the epoch counts for where learning rates depend on them."""

    @abstractmethod
    def commit(self) -> Sequence[tuple[int, Attempt]] | None:
        """Once all tasks of a step are done: the pushes to apply; the next step's tasks open."""

    def release(self, member: Member) -> None:
        """A member holds nothing any more."""
        self._pool.release(member)

    def close(self) -> None:
        """End the epoch here, in `Sync` at the last committed step."""
        self.is_closed = True

    def waits_for(self) -> dict[int, tuple[Member, float]]:
        """The tasks pending, with who holds them and since when."""
        return self._pool.pending()

    def _hand_out(self, member: Member, now: Now) -> tuple[int, Attempt] | None:
        if self.is_closed:
            return None
        return self._pool.hand_out(member, now.time_s, self._patience.backup_after_s())

    def _finish(self, done: TrainDone, now_s: float) -> int | None:
        """The task of which this is the first attempt reported done; None if it counts no more."""
        finished = self._pool.finish(done.attempt)
        if finished is None or self.is_closed:
            return None
        index, since = finished
        if since is not None:
            self._patience.measure(now_s - since)
        return index


class SyncEpoch(Epoch):
    """An epoch under `Sync`: steps of up to K tasks, one batch each; task k is the next batch of stream k.

    Args:
        number: of the epoch.
        data: what it goes over.
        streams: K.
        version: what its first step reads.
        numbers: numbers attempts.
        patience: how long a task may be pending.
        local_steps: batches of a task, which are the next ones of its stream.
        first: the number of its first batch.
    """

    def __init__(
        self,
        number: int,
        data: DataSpec,
        streams: int,
        version: int,
        numbers: AttemptNumbers,
        patience: Patience,
        local_steps: int = 1,
        first: int = 0,
    ) -> None:
        super().__init__(number, data, sync_steps(data.samples, streams, data.batch_size * local_steps), patience)
        self._streams, self._local_steps = streams, local_steps
        self._first_version, self._first = version, first
        self._numbers = numbers
        self._owners: dict[int, Member] = {}
        self._chosen: dict[int, Attempt | None] = {}
        self._pool = self._open_step()

    def hand_out(self, member: Member, now: Now) -> SyncTask | None:
        """A task of the present step."""
        handed = self._hand_out(member, now)
        if handed is None:
            return None
        index, attempt = handed
        self._owners[index] = member
        start, stop = self._samples(index)
        version, first = self._first_version + self.step, self._first + self.step * self._local_steps
        return SyncTask(now.request, now.term, now.generation, attempt, self.number, version, index, start, stop, first)

    def finish(self, done: TrainDone, now_s: float) -> int:
        """The first attempt reported done is the one that counts."""
        index = self._finish(done, now_s)
        if index is None:
            return 0
        self._chosen[index] = done.attempt if done.contributed else None
        start, stop = self._samples(index)
        return stop - start

    @property
    def batches(self) -> int:
        """Those of the longest stream in the steps committed."""
        longest = sync_steps(self.data.samples, self._streams, self.data.batch_size)
        return min(self.step * self._local_steps, longest)

    def commit(self) -> Sequence[tuple[int, Attempt]] | None:
        """The attempts that count, in task order; tasks that contribute nothing are not among them."""
        if self.is_closed or not self._pool.all_done():
            return None
        chosen = [(index, attempt) for index, attempt in sorted(self._chosen.items()) if attempt is not None]
        self.step += 1
        self.is_closed = self.step == self.steps
        self._pool = self._open_step()
        return chosen

    def _open_step(self) -> TaskPool:
        self._chosen = {}
        indices = range(0) if self.is_closed else range(self._streams)
        tasks = [k for k in indices if self._samples(k)[0] < self._samples(k)[1]]
        return TaskPool(tasks, self._numbers, self._owners)

    def _samples(self, index: int) -> tuple[int, int]:
        length = self.data.batch_size * self._local_steps
        return sync_task(self.data.samples, self._streams, length, self.step, index)


class AsyncEpoch(Epoch):
    """An epoch under `Async`: tasks of several batches in any order; the pservers count the batches."""

    def __init__(
        self, number: int, data: DataSpec, batches: int, first: int, numbers: AttemptNumbers, patience: Patience
    ) -> None:
        super().__init__(number, data, async_tasks(data.samples, data.batch_size, batches), patience)
        self._batches = batches
        self._first = first
        self._pool = TaskPool(range(self.steps), numbers, None)

    def hand_out(self, member: Member, now: Now) -> AsyncTask | None:
        """Any task."""
        handed = self._hand_out(member, now)
        if handed is None:
            return None
        task, attempt = handed
        start, stop = self._samples(task)
        first = self._first + task * self._batches
        return AsyncTask(now.request, now.term, now.generation, attempt, self.number, task, start, stop, first)

    def finish(self, done: TrainDone, now_s: float) -> int:
        """All batches of a task are applied on every pserver."""
        task = self._finish(done, now_s)
        if task is None:
            return 0
        self.step = self._pool.done
        self.is_closed = self._pool.all_done()
        start, stop = self._samples(task)
        return stop - start

    @property
    def batches(self) -> int:
        """All, also of an epoch left early."""
        return -(-self.data.samples // self.data.batch_size)

    def commit(self) -> None:
        """There is nothing to commit: batches are applied as they come."""
        return

    def _samples(self, task: int) -> tuple[int, int]:
        return async_task(self.data.samples, self.data.batch_size, self._batches, task)


class Training:
    """All epochs so far: the last one, and where the next one starts.

    Invariants:
    1. Only one epoch is open, the last.
    2. `version` is what the present step reads; it grows by one with each commit.
    """

    def __init__(self, update: UpdateSpec, numbers: AttemptNumbers) -> None:
        self.version = 0
        self.epoch: Epoch | None = None
        self._update = update
        self._numbers = numbers
        self._patience = Patience(update.backup_after_s, update.batches if update.is_sync else 1)
        self._batches = 0

    @property
    def number(self) -> int:
        """The number of the last epoch begun; -1 before the first."""
        return -1 if self.epoch is None else self.epoch.number

    @property
    def is_idle(self) -> bool:
        """Whether no epoch is open and nobody is at a task of one that was left early."""
        return self.epoch is None or (self.epoch.is_closed and not self.epoch.waits_for())

    def open(self, number: int, data: DataSpec) -> Epoch:
        """Begin an epoch."""
        self._batches += 0 if self.epoch is None else self.epoch.batches
        count, numbers, patience = self._update.batches, self._numbers, self._patience
        if self._update.is_sync:
            steps = self._update.local_steps
            self.epoch = SyncEpoch(number, data, count, self.version, numbers, patience, steps, self._batches)
        else:
            self.epoch = AsyncEpoch(number, data, count, self._batches, numbers, patience)
        return self.epoch
