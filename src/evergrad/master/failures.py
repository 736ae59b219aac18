"""Exceptions that scripts have raised in tasks: when a task is set aside, and when the job has failed."""

from evergrad.master.training import Failed
from evergrad.messages import SetAside

MAX_FAILURES = 3
"""So many attempts of a task may fail, if the user says nothing else."""
IN_A_ROW = 3
"""When so many tasks have been set aside and none was done in between, nothing works any more."""
MOST_SET_ASIDE = 100
"""More tasks than this are not set aside."""


class Failures:
    """Counts exceptions.

    A task in which the script has raised `max_failures` times is set aside. The job fails when that is no help: when
    the script has raised in two tasks before any was ever done, as one with a slip in it does, when `IN_A_ROW` tasks
    were set aside with none done in between, or when there are more than `MOST_SET_ASIDE`.

    Cost: what is said of each task set aside.
    """

    def __init__(self, max_failures: int = MAX_FAILURES) -> None:
        self.set_aside: list[SetAside] = []
        self._max_failures = max_failures
        self._is_anything_done = False
        self._first: str | None = None
        self._in_a_row: set[str] = set()

    def done(self) -> None:
        """A task was done."""
        self._is_anything_done = True
        self._in_a_row.clear()

    def is_last(self, failed: Failed) -> bool:
        """Whether a task that has failed is to be set aside."""
        return failed.times >= self._max_failures

    def note(self, failed: Failed, error: str) -> str | None:
        """The script has raised `error`; returns why the job has failed by that, None if it has not."""
        self._first = self._first or failed.where
        if self.is_last(failed):
            # one that is tried again after a fall-back, or by another master, is one task still
            self.set_aside = [task for task in self.set_aside if task.task != failed.where]
            self.set_aside.append(SetAside(failed.where, failed.samples, error))
            self._in_a_row.add(failed.where)
        if not self._is_anything_done and failed.where != self._first:
            return "the script has raised in two tasks, and none was ever done"
        if len(self._in_a_row) >= IN_A_ROW:
            return f"{IN_A_ROW} tasks were set aside, and none was done in between"
        if len(self.set_aside) > MOST_SET_ASIDE:
            return f"more than {MOST_SET_ASIDE} tasks were set aside"
        return None

    def words(self, failed: Failed) -> str:
        """How often the script has raised in a task, and what follows."""
        count = f"{failed.times} of {self._max_failures}"
        return f"{count}, so it is set aside with {failed.samples:,} samples" if self.is_last(failed) else count

    def summary(self) -> str | None:
        """Why a job that has come to its end has not succeeded; None if nothing was set aside."""
        if not self.set_aside:
            return None
        samples = sum(task.samples for task in self.set_aside)
        tasks = f"{len(self.set_aside)} task{'s' if len(self.set_aside) > 1 else ''}"
        return (
            f"the script raised in {tasks} until they were set aside, and {samples:,} samples were left out; correct"
            " the script or the data, and train again"
        )
