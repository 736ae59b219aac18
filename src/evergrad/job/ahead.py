"""Reading a task's batches ahead: the next one in a thread of its own while the script computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Reader:
    """The thread, begun when first used; `close` ends it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "evergrad-reader")

    def submit(self, read: Callable[[int], T], number: int) -> "Future[T]":
        """Have a batch read."""
        return self._executor.submit(read, number)

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._executor.shutdown(cancel_futures=True)


class Ahead(Generic[T]):
    """Batches of one task, taken in order.

    Args:
        read: reads a batch by its number in the task.
        count: how many there are.
        reader: where to read, then also ahead, so that never two batches are read at once; None: where it is taken.
    """

    def __init__(self, read: Callable[[int], T], count: int, reader: Reader | None) -> None:
        self.count = count
        self._read, self._reader = read, reader
        self._next: tuple[int, Future[T]] | None = None

    def take(self, number: int) -> T:
        """A batch, read ahead or now. What reading it raised is raised here."""
        if self._next is not None and self._next[0] == number:
            (_, future), self._next = self._next, None
            return future.result()
        return self._read(number) if self._reader is None else self._reader.submit(self._read, number).result()

    def start(self, number: int) -> None:
        """Begin to read this batch, if there is one."""
        if self._reader is not None and number < self.count:
            self._next = number, self._reader.submit(self._read, number)


class Onward(Generic[T]):
    """Batches of a task, counted on into the task that is likely to follow, if there is one."""

    def __init__(self, task: Ahead[T], following: Ahead[T] | None) -> None:
        self._task, self._following = task, following

    def has(self, number: int) -> bool:
        """Whether there is such a batch."""
        return number < self._task.count or self._following is not None

    def take(self, number: int) -> T:
        """A batch; see `Ahead`."""
        of, number = self._place(number)
        return of.take(number)

    def start(self, number: int) -> None:
        """Begin to read this batch, if there is one."""
        if self.has(number):
            of, number = self._place(number)
            of.start(number)

    def _place(self, number: int) -> tuple[Ahead[T], int]:
        if number < self._task.count or self._following is None:
            return self._task, number
        return self._following, number - self._task.count
