"""What all trainers do together between steps: evaluations and saving the model.

Each is known by its place in the script, (epoch, number of the call in it), and is open or done; once done, every
trainer that comes by gets the same answer.
"""

from evergrad.errors import DataError
from evergrad.master.dispatch import AttemptNumbers, TaskPool
from evergrad.messages import Attempt, DataSpec, EvalDone, EvaluationDone, Member, Partial, SavingDone
from evergrad.metrics import merge, partial, result
from evergrad.schedule import eval_task, eval_tasks

Call = tuple[int, int]
"""Epoch, and the number of the call in it."""


class Evaluation:
    """An evaluation under way: its tasks, and the totals of those done, added up in the order of tasks."""

    title = "a task of the evaluation"

    def __init__(self, data: DataSpec, numbers: AttemptNumbers) -> None:
        self.data = data
        self.totals: dict[str, Partial] = {}  # once done, of kind "sum": what there is to know, and no more
        self.failure: str | None = None
        self.is_past = False
        """Whether another master has seen it done, maybe in another job, which had other data."""
        self._count = eval_tasks(data.samples, data.batch_size)
        self._pool = TaskPool(range(self._count), numbers, None)
        self._waiting: dict[int, dict[str, Partial]] = {}
        self._added = 0

    @classmethod
    def again(cls, done: EvaluationDone, numbers: AttemptNumbers) -> "Evaluation":
        """One that another master has seen done."""
        evaluation = cls(done.data, numbers)
        evaluation.totals, evaluation.failure, evaluation._added = done.totals, done.failure, evaluation._count
        evaluation.is_past = True
        return evaluation

    @property
    def is_done(self) -> bool:
        """Whether the totals are complete, or the evaluation has failed."""
        return self._added == self._count or self.failure is not None

    def hand_out(self, member: Member, now_s: float) -> tuple[Attempt, int, int] | None:
        """An attempt, and the samples [start, stop) it is for."""
        handed = self._pool.hand_out(member, now_s, None)
        if handed is None:
            return None
        index, attempt = handed
        return attempt, *eval_task(self.data.samples, self.data.batch_size, index)

    def finish(self, done: EvalDone) -> None:
        """Add what one task found; it fails the evaluation if the script raised, or its metrics do not add up."""
        finished = self._pool.finish(done.attempt)
        if finished is None or self.failure is not None:
            return
        self.failure = done.failure
        self._waiting[finished[0]] = done.totals
        try:
            while self.failure is None and (part := self._waiting.pop(self._added, None)) is not None:
                self.totals = part if self._added == 0 else _added_up(self.totals, part)
                self._added += 1
        except DataError as exc:
            self.failure = str(exc)
        if self.is_done:
            self.totals = {name: partial(result(total)) for name, total in self.totals.items()}

    def release(self, member: Member) -> None:
        """A member holds nothing any more."""
        self._pool.release(member)

    def waits_for(self) -> dict[int, tuple[Member, float]]:
        """The tasks pending, with who holds them and since when."""
        return self._pool.pending()


class Saving:
    """A model to be saved by one trainer, the leader."""

    title = "the saving of the model"

    def __init__(self, path: str, numbers: AttemptNumbers) -> None:
        self.path = path
        self.failure: str | None = None
        self.is_past = False
        """Whether another master has seen it done, maybe in another job, which had another path."""
        self._pool = TaskPool([0], numbers, None)

    @classmethod
    def again(cls, done: SavingDone, numbers: AttemptNumbers) -> "Saving":
        """One that another master has seen done."""
        saving = cls(done.path, numbers)
        saving.failure, saving._pool, saving.is_past = done.failure, TaskPool((), numbers, None), True
        return saving

    @property
    def is_done(self) -> bool:
        """Whether the model is there, or could not be written."""
        return self._pool.all_done()

    def hand_out(self, member: Member, now_s: float) -> Attempt | None:
        """The one task, if nobody is at it."""
        handed = self._pool.hand_out(member, now_s, None)
        return handed[1] if handed else None

    def is_at(self, attempt: Attempt) -> bool:
        """Whether this attempt counts, if it is reported done."""
        return self._pool.is_known(attempt)

    def finish(self, attempt: Attempt, failure: str | None) -> None:
        """The leader has saved it, or could not."""
        if self._pool.finish(attempt):
            self.failure = failure

    def release(self, member: Member) -> None:
        """A member holds nothing any more."""
        self._pool.release(member)

    def waits_for(self) -> dict[int, tuple[Member, float]]:
        """The tasks pending, with who holds them and since when."""
        return self._pool.pending()


def _added_up(totals: dict[str, Partial], part: dict[str, Partial]) -> dict[str, Partial]:
    if totals.keys() != part.keys():
        raise DataError(f"evaluate: batches returned different metrics, {sorted(totals)} and {sorted(part)}")
    return {name: merge(total, part[name]) for name, total in totals.items()}
