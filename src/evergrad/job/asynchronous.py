"""A trainer's way through the tasks of `Async`: reading ahead, waiting for slower trainers, pushing in groups."""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from evergrad.errors import InvariantError
from evergrad.job.ahead import Ahead, Onward
from evergrad.job.arguments import added
from evergrad.job.batch import Fetched, OpenBatch, Read
from evergrad.job.held_rows import HeldRows
from evergrad.messages import AsyncTask, Generation, Partial, Schema, TaskBatches
from evergrad.trainer.accumulated import Accumulated, Contribution
from evergrad.trainer.exchange import Flow
from evergrad.trainer.session import AtTask, Session
from evergrad.trainer.trainer import PushRefused, RowGrads, SpanGrads, Void

Ask = Callable[[Read, HeldRows | None], Fetched]
"""Asks for what a batch needs beyond what is held."""
Metrics = dict[str, Partial]
ReadingOf = Callable[[TaskBatches], Ahead[Read]]
"""Reads the batches of a task of the same epoch."""
TaskId = tuple[Generation, int, int]
"""A generation, an epoch and the number of a task."""


class _Pushing(NamedTuple):
    """A group of batches on its way to the pservers."""

    task: AsyncTask
    first: int
    batches: int
    is_empty: bool
    flow: Flow[None]


class _Prepared(NamedTuple):
    """The task that is likely to come next, whose first batch is asked for already."""

    task: TaskId
    reading: Ahead[Read]
    fetched: Fetched
    held: HeldRows | None


class AsyncTasks:
    """Runs through asynchronous tasks, batch by batch.

    A task's batches are pushed in groups of `push_every`, counted from its beginning, so that all trainers cut it
    alike; it is resumed where a group begins. Everything is pulled anew every `pull_every` batches, and where a task is
    begun or resumed. For the first batch of the task that is likely to follow is pulled as for the next one of a task:
    between two tasks a trainer would else wait for as long as a push, a pull and reading a batch take.

    Args:
        session: the conversation with the job.
        is_ahead: whether to pull for the next batch, and to push, while the script computes.
        enter: puts what a batch needs into the model, makes it the open one and returns it as the script gets it.
        check: told of every batch that the script has left.
        warn: says something once.
    """

    def __init__(
        self,
        session: Session,
        is_ahead: bool,
        enter: Callable[[OpenBatch, Fetched], Any],
        check: Callable[[OpenBatch], None],
        warn: Callable[[str], None],
    ) -> None:
        self._session, self.is_ahead = session, is_ahead
        self._enter, self._check, self._warn = enter, check, warn
        self._group: Accumulated | None = None
        self._first = self._stop = 0
        self._pushing: _Pushing | None = None
        self._prepared: _Prepared | None = None

    def run(
        self, task: AsyncTask, schema: Schema, reading_of: ReadingOf, ask: Ask
    ) -> Generator[Any, None, Metrics | None]:
        """The batches of a task from where the pservers stand on.

        Returns:
            The metrics of all batches once every pserver has applied them; None if the task counts no more.
        """
        try:
            return (yield from self._run(task, schema, reading_of, ask))
        except GeneratorExit:
            with suppress(Void):
                self._finish_push()
            raise
        except Void:
            with suppress(Void):
                self._finish_push()
            return None
        finally:
            self._group = self._pushing = None

    def forget(self) -> None:
        """No task follows the last one."""
        self._prepared = None

    def contribute(self, batch: OpenBatch, rows: Sequence[RowGrads], spans: Sequence[SpanGrads]) -> None:
        """The open batch contributes these; its group is pushed if it is the last, once the one before is applied."""
        task = batch.task
        assert self._group is not None
        assert isinstance(task, AsyncTask)
        self._group.add(rows, spans, batch.samples, batch.evict)
        if batch.number + 1 == self._stop:
            self._push(task)

    def _run(self, task: AsyncTask, schema: Schema, reading_of: ReadingOf, ask: Ask) -> Generator[Any, None, Metrics]:
        ahead: Fetched | Exception | None
        reading, ahead, held = self._take_prepared(task) or (reading_of(task.batches), None, None)
        following = reading_of(task.following) if self.is_ahead and task.following is not None else None
        batches = Onward(reading, following)
        update, count, metrics = schema.update, reading.count, Metrics()
        first = self._session.driver.run(self._session.trainer.where(task))
        self._applied(task, first)
        if first:
            ahead = held = None

        def fetch(number: int) -> Fetched:
            nonlocal held
            if update.pull_every > 1 and (number in (first, count) or number % update.pull_every == 0):
                held = HeldRows(schema.tables)
            return ask(batches.take(number), held)

        for number in range(first, count):
            if number % update.push_every == 0:
                self._group = Accumulated(schema)
                self._first, self._stop = number, min(number + update.push_every, count)
            if update.max_staleness is not None:
                self._session.driver.run(self._session.trainer.may_begin(task, number - first))
            fetched, ahead = ahead or fetch(number), None
            if isinstance(fetched, Exception):
                raise fetched
            if self.is_ahead and batches.has(number + 1):
                try:
                    ahead = fetch(number + 1)
                except Exception as exc:  # raised in its turn
                    ahead = exc
            batch = OpenBatch(task, task.first + number, fetched.read.samples, number)
            opened = self._enter(batch, fetched)
            if self.is_ahead:
                batches.start(number + 2)
            yield opened
            self._check(batch)
            if number + 1 == self._stop and self._group is not None:
                self._push(task)
            if number + 1 == count or not isinstance(ahead, Fetched):
                self._finish_push()
            metrics = added(metrics, batch.metrics)
        if isinstance(ahead, Fetched) and following is not None and task.following is not None:
            self._prepared = _Prepared(_task_id(task, task.following), following, ahead, held)
        return metrics

    def _take_prepared(self, task: AsyncTask) -> tuple[Ahead[Read], Fetched, HeldRows | None] | None:
        """What was prepared for this task, if it is the one that was to follow."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared.task != _task_id(task, task.batches):
            return None
        return prepared.reading, prepared.fetched, prepared.held

    def _push(self, task: AsyncTask) -> None:
        """Start to push what the present group contributes."""
        assert self._group is not None
        self._finish_push()
        together, self._group = self._group.together(), None
        self._start_push(task, self._first, self._stop - self._first, together)

    def _start_push(self, task: AsyncTask, first: int, batches: int, together: Contribution) -> None:
        push = self._session.trainer.push_batch(task, first, *together, batches)
        is_empty = not (together.rows or together.spans or together.evict)
        self._pushing = _Pushing(task, first, batches, is_empty, self._session.driver.start(push))

    def _finish_push(self) -> None:
        """Wait until the group on its way is applied; one that is refused counts as done with nothing in it."""
        while (pushing := self._pushing) is not None:
            self._pushing = None
            task, first, batches, is_empty, flow = pushing
            try:
                self._session.driver.run(flow)
                self._applied(task, first + batches)
            except PushRefused as exc:
                if is_empty:
                    raise InvariantError(f"a push of nothing is refused: {exc}") from exc
                self._warn(f"a batch was left out: {exc}")
                self._start_push(task, first, batches, Contribution())

    def _applied(self, task: AsyncTask, batches: int) -> None:
        self._session.task = AtTask(task.generation, task.attempt, batches)


def _task_id(task: AsyncTask, batches: TaskBatches) -> TaskId:
    return task.generation, task.epoch, batches.task
