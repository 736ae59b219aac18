"""An epoch of training under each update rule: which tasks there are, and when it is over.

A round of `LocalSGD` is a step of `Sync` whose tasks are of several batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from evergrad.master.dispatch import AttemptNumbers, TaskPool
from evergrad.master.pace import Pace
from evergrad.messages import (
    AsyncTask,
    Attempt,
    DataSpec,
    Generation,
    Member,
    Progress,
    Request,
    Standing,
    SyncTask,
    TaskBatches,
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


class Failed(NamedTuple):
    """A task in which the script has raised."""

    task: int
    where: str
    """For people: "epoch 0, step 3, task 1"."""
    times: int
    """How many of its attempts have failed."""
    samples: int
    """Samples that are left out if it is set aside now."""


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
        self.is_leaving = self.is_left = False
        """Whether it is being ended early, with the step at hand if that is complete, and whether it was."""
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
    def progress(self) -> Progress:
        """How far it is."""

    @abstractmethod
    def commit(self) -> Sequence[tuple[int, Attempt]] | None:
        """Once all tasks of a step are done: the pushes to apply; the next step's tasks open."""

    @abstractmethod
    def drop_late(self, now_s: float) -> int:
        """Do without tasks that are late where only they are missing; returns how many samples they are."""

    @abstractmethod
    def set_aside(self, task: int) -> None:
        """A task contributes nothing, or nothing more, and counts as done."""

    def failed(self, attempt: Attempt, batches: int) -> Failed | None:
        """The script has raised in an attempt, `batches` batches of which are applied; None if it counts no more."""
        failed = self._pool.fail(attempt)
        if failed is None or self.is_closed:
            return None
        task, times = failed
        start, stop = self._samples(task)
        return Failed(task, self._where(task), times, max(stop - start - batches * self.data.batch_size, 0))

    def excuse(self, seconds: float, now_s: float) -> None:
        """For so long until now nobody could report anything."""
        self._pool.excuse(seconds, now_s)

    def release(self, member: Member) -> None:
        """A member holds nothing any more."""
        self._pool.release(member)

    def close(self) -> None:
        """End the epoch here, in `Sync` at the last committed step."""
        self.is_closed = self.is_left = True

    def waits_for(self) -> dict[int, tuple[Member, float]]:
        """The tasks pending, with who holds them and since when."""
        return self._pool.pending()

    @abstractmethod
    def _samples(self, task: int) -> tuple[int, int]:
        """The positions [start, stop) of a task."""

    @abstractmethod
    def _where(self, task: int) -> str:
        """A task's name for people."""

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
        drop_after_s: float | None = None,
        step: int = 0,
    ) -> None:
        super().__init__(number, data, sync_steps(data.samples, streams, data.batch_size * local_steps), patience)
        self.step = step
        self.is_closed = step >= self.steps
        self._streams, self._local_steps = streams, local_steps
        self._first_version, self._first = version - step, first
        self._drop_after_s = drop_after_s
        self._first_s: dict[int, float] = {}
        self._came = 0
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
        self._first_s.setdefault(index, now.time_s)
        start, stop = self._samples(index)
        version, first = self._first_version + self.step, self._first + self.step * self._local_steps
        return SyncTask(now.request, now.term, now.generation, attempt, self.number, version, index, start, stop, first)

    def finish(self, done: TrainDone, now_s: float) -> int:
        """The first attempt reported done is the one that counts."""
        index = self._finish(done, now_s)
        if index is None:
            return 0
        self._came += 1
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
        self.is_left |= self.is_leaving
        self.is_closed = self.is_left or self.step == self.steps
        self._pool = self._open_step()
        return chosen

    def progress(self) -> Progress:
        """Its steps are versions."""
        return Progress(
            version=self._first_version + self.step,
            epoch=self.number,
            data=self.data,
            first_version=self._first_version,
            first_batch=self._first,
            is_closed=self.is_closed,
        )

    def drop_late(self, now_s: float) -> int:
        """A task is late `drop_after` seconds after it was first handed out; at least one must have come."""
        after_s = self._drop_after_s
        if after_s is None or self.is_closed or not self._came or self._pool.has_fresh():
            return 0
        left = self._pool.left()
        if not all(now_s - self._first_s[task] > after_s for task in left):
            return 0
        for task in left:
            self.set_aside(task)
        return sum(stop - start for start, stop in map(self._samples, left))

    def set_aside(self, task: int) -> None:
        """The step is committed without it."""
        self._pool.set_aside(task)
        self._chosen[task] = None

    def excuse(self, seconds: float, now_s: float) -> None:
        """What is late, too, is late by that much less."""
        super().excuse(seconds, now_s)
        self._first_s = {index: min(since + seconds, now_s) for index, since in self._first_s.items()}

    def _open_step(self) -> TaskPool:
        self._chosen, self._first_s, self._came = {}, {}, 0
        indices = range(0) if self.is_closed else range(self._streams)
        tasks = [k for k in indices if self._samples(k)[0] < self._samples(k)[1]]
        return TaskPool(tasks, self._numbers, self._owners)

    def _samples(self, task: int) -> tuple[int, int]:
        length = self.data.batch_size * self._local_steps
        return sync_task(self.data.samples, self._streams, length, self.step, task)

    def _where(self, task: int) -> str:
        return f"epoch {self.number}, step {self.step}, task {task}"


class AsyncEpoch(Epoch):
    """An epoch under `Async`: tasks of several batches in any order; the pservers count the batches."""

    def __init__(
        self,
        number: int,
        data: DataSpec,
        batches: int,
        first: int,
        numbers: AttemptNumbers,
        patience: Patience,
        max_staleness: int | None = None,
        standing: Standing = (),
    ) -> None:
        super().__init__(number, data, async_tasks(data.samples, data.batch_size, batches), patience)
        self.pace = None if max_staleness is None else Pace(max_staleness)
        self._batches = batches
        self._first = first
        done = {task for task, applied in standing if applied >= self._batches_of(task)}
        self.step = len(done)
        self.is_closed = self.step == self.steps
        self._done_before = len(done)
        self._pool = TaskPool([task for task in range(self.steps) if task not in done], numbers, None)

    def hand_out(self, member: Member, now: Now) -> AsyncTask | None:
        """Any task."""
        handed = self._hand_out(member, now)
        if handed is None:
            return None
        task, attempt = handed
        if self.pace is not None:
            self.pace.take(member, attempt)
        here, following = self._batches_of_task(task), None
        # under bounded staleness no values may be pulled before the task is given: that may be late
        if self.pace is None and (put_by := self._pool.put_by(member)) is not None:
            following = self._batches_of_task(put_by)
        at = (now.request, now.term, now.generation, attempt, self.number)
        return AsyncTask(*at, here.task, here.start, here.stop, here.first, following)

    def finish(self, done: TrainDone, now_s: float) -> int:
        """All batches of a task are applied on every pserver."""
        task = self._finish(done, now_s)
        if task is None:
            return 0
        if self.pace is not None:
            self.pace.finish(done.attempt)
        self._count_done()
        start, stop = self._samples(task)
        return stop - start

    @property
    def batches(self) -> int:
        """All, also of an epoch left early."""
        return -(-self.data.samples // self.data.batch_size)

    def commit(self) -> None:
        """There is nothing to commit: batches are applied as they come."""
        return

    def progress(self) -> Progress:
        """How far its tasks are only the pservers know."""
        return Progress(epoch=self.number, data=self.data, first_batch=self._first, is_closed=self.is_closed)

    def drop_late(self, now_s: float) -> int:
        """No task waits for another."""
        return 0

    def set_aside(self, task: int) -> None:
        """What of it is applied stays; the rest is left out."""
        self._pool.set_aside(task)
        self._count_done()

    def release(self, member: Member) -> None:
        """A member holds nothing any more."""
        super().release(member)
        if self.pace is not None:
            self.pace.release(member)

    def settle(self) -> None:
        """Whoever waits for a task has got one if there is any."""
        if self.pace is not None:
            self.pace.settle(self._pool.holds)

    def may_begin(self, member: Member, attempt: Attempt, done: int) -> bool | None:
        """Whether a trainer that has done so many batches in an attempt may begin another.

        None: it is to give it up, since it counts no more.
        """
        if self.is_closed or not self._pool.holds(member, attempt):
            return None
        return self.pace is None or self.pace.may_begin(member, done)

    def _count_done(self) -> None:
        self.step = self._done_before + self._pool.done
        self.is_closed = self._pool.all_done()
        if self.pace is not None:
            self.pace.unsettle()

    def _batches_of_task(self, task: int) -> TaskBatches:
        return TaskBatches(task, *self._samples(task), self._first + task * self._batches)

    def _batches_of(self, task: int) -> int:
        start, stop = self._samples(task)
        return -(-(stop - start) // self.data.batch_size)

    def _samples(self, task: int) -> tuple[int, int]:
        return async_task(self.data.samples, self.data.batch_size, self._batches, task)

    def _where(self, task: int) -> str:
        return f"epoch {self.number}, task {task}"


class Training:
    """All epochs so far: the last one, and where the next one starts.

    Invariants:
    1. Only one epoch is open, the last.
    2. `version` is what the present step reads; it grows by one with each commit.
    3. In `Async` an epoch is over only when every pserver has been told so, after which it applies none of its batches.
    """

    def __init__(self, update: UpdateSpec, numbers: AttemptNumbers) -> None:
        self.version = 0
        self.epoch: Epoch | None = None
        self._update = update
        self._numbers = numbers
        self._patience = Patience(update.backup_after_s, update.batches if update.is_sync else 1)
        self._batches = 0
        self._is_told = self._is_settled = True

    @property
    def number(self) -> int:
        """The number of the last epoch begun; -1 before the first."""
        return -1 if self.epoch is None else self.epoch.number

    @property
    def is_idle(self) -> bool:
        """Whether no epoch is open, nobody is at a task of one that was left early, and its batches are settled."""
        return self.epoch is None or (self._is_left(self.epoch) and self._is_settled)

    def over(self) -> int | None:
        """The epoch that the pservers must be told is over, once; None while there is none."""
        if self._is_told or self.epoch is None or not self._is_left(self.epoch):
            return None
        self._is_told = True
        return self.epoch.number

    def settle(self) -> None:
        """The pservers know that the epoch is over, if they have been told."""
        self._is_settled = self._is_told

    def excuse(self, seconds: float, now_s: float) -> None:
        """For so long until now nobody could report anything."""
        if self.epoch is not None:
            self.epoch.excuse(seconds, now_s)

    def open(self, number: int, data: DataSpec) -> Epoch:
        """Begin an epoch."""
        self._batches += 0 if self.epoch is None else self.epoch.batches
        return self._go_on(number, data, 0, ())

    def progress(self) -> Progress:
        """How far it is; in `async` without the standing of tasks, which only the pservers know."""
        return Progress(version=self.version) if self.epoch is None else self.epoch.progress()

    def restore(self, progress: Progress, are_told: bool) -> None:
        """Go on from there; who held what is forgotten. `are_told`: the pservers know if that epoch is over."""
        self.version, self.epoch, self._batches = progress.version, None, progress.first_batch
        self._is_told = self._is_settled = True
        if progress.data is not None:
            step = progress.version - progress.first_version
            epoch = self._go_on(progress.epoch, progress.data, step, progress.standing)
            if progress.is_closed:
                epoch.close()
                self._is_told = self._is_settled = are_told or self._update.is_sync

    @property
    def steps(self) -> int:
        """Steps so far; in `async` batches of tasks that are done."""
        if self._update.is_sync:
            return self.version
        return self._batches + (self.epoch.step * self._update.batches if self.epoch is not None else 0)

    def _go_on(self, number: int, data: DataSpec, step: int, standing: Standing) -> Epoch:
        update, count, patience = self._update, self._update.batches, self._patience
        if update.is_sync:
            self.epoch = SyncEpoch(
                number, data, count, self.version, self._numbers, patience,
                update.local_steps, self._batches, update.drop_after_s, step,
            )  # fmt: skip
        else:
            self.epoch = AsyncEpoch(
                number, data, count, self._batches, self._numbers, patience, update.max_staleness, standing
            )
            self._is_told = self._is_settled = False
        return self.epoch

    def _is_left(self, epoch: Epoch) -> bool:
        return epoch.is_closed and not epoch.waits_for()
