"""The storage of a simulated job: its checkpoints' files and its record, which outlive all processes.

The files are written and read by the real code; what is simulated is how long it takes, that the storage is away or
full for a while, and that who writes is killed in the middle.
"""

import errno
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, BinaryIO
from unittest import mock

from evergrad.checkpoint import files, reader, storage
from evergrad.checkpoint.layout import MANIFEST, folder_of, serial_of
from evergrad.checkpoint.storage import Buffer, Retry

if TYPE_CHECKING:
    from .network import Clock
    from .processes import Process

URL = "simulated://checkpoints"
MEAN_S, MEAN_SLOW_S = 0.02, 0.8


class Shelf:
    """Files in memory: the `Backend` of `URL`.

    Args:
        offered: told of a serial whose manifest has been put, when it is there.

    Attributes:
        files: what there is, by path.
        is_full: nothing can be written.
        left: so many files can be written or removed until whoever does it is killed; None: he is not.
    """

    def __init__(self, offered: Callable[[int], None]) -> None:
        self.files: dict[str, bytes] = {}
        self.is_full = False
        self.left: int | None = None
        self._offered = offered

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        self._change()
        self.files[path] = b"".join(bytes(part) for part in parts)

    def put_new(self, path: str, data: bytes) -> bool:
        self._change()
        if path in self.files:
            return False
        self.files[path] = data
        folder, _, name = path.rpartition("/")
        if name == MANIFEST:
            self._offered(serial_of(folder))
        return True

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def read_into(self, path: str, buffer: memoryview) -> int:
        data = self.read(path)
        if len(data) == len(buffer):
            buffer[:] = data
        return len(data)

    def writer(self, path: str) -> AbstractContextManager[BinaryIO]:
        raise NotImplementedError  # nothing in a job writes to a checkpoint so

    def sizes(self, folder: str) -> dict[str, int]:
        return {path: len(data) for path, data in self.files.items() if path.startswith(f"{folder}/")}

    def folders(self) -> list[str]:
        return list({path.partition("/")[0]: None for path in self.files})

    def remove(self, path: str) -> None:
        if self.left is not None:
            self._change()
        self.files.pop(path, None)

    def remove_if_empty(self, folder: str) -> None:
        """Folders are but names."""

    def close(self) -> None:
        """Nothing is held."""

    def tear(self, serial: int) -> None:
        """Whoever has been writing a file of this checkpoint is killed: half of it stays, under another name."""
        self.files[f"{folder_of(serial)}/.1.0badcafe.part"] = b"half"

    @contextmanager
    def killing(self, after: int) -> Iterator[None]:
        """Whoever writes or removes inside is killed after so many files."""
        self.left = after
        try:
            yield
        finally:
            self.left = None

    def _change(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise OSError(errno.ENOSPC, "killed")
            self.left -= 1
        elif self.is_full:
            raise OSError(errno.ENOSPC, "full")


class _AtOnce:
    """Stands for a `ThreadPoolExecutor`, whose threads cost more than all they do here."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "_AtOnce":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def submit(self, work, *args) -> Future:
        future: Future = Future()
        future.set_result(work(*args))
        return future


class _Done:
    """Stands for a `Thread`, as above."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start = target

    def join(self) -> None:
        pass


@contextmanager
def mounted(shelf: Shelf) -> Iterator[None]:
    """Inside, `URL` is on this shelf."""
    with (
        mock.patch.object(storage, "_backend", return_value=shelf),
        mock.patch.object(files, "Thread", _Done),
        mock.patch.object(reader, "ThreadPoolExecutor", _AtOnce),
    ):
        yield


class Store:
    """What outlives all processes, and how it is at this time.

    Attributes:
        record: what was written last.
        shelf: the files of checkpoints.
        away_until_s, full_until_s, slow_until_s, record_away_until_s: how long it is so.
    """

    def __init__(self, clock: "Clock", rng: random.Random, offered: Callable[[int], None]) -> None:
        self.record: bytes | None = None
        self.shelf = Shelf(offered)
        self.away_until_s = self.full_until_s = self.slow_until_s = self.record_away_until_s = 0.0
        self._clock, self._rng = clock, rng

    @property
    def is_record_away(self) -> bool:
        return self._clock.now_s < self.record_away_until_s

    def work(self, process: "Process", act: Callable[[], None], is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Have a process's thread act on storage when that has taken its time; when it is away, tried again."""
        waits_s = Retry().waits_s()

        def attempt() -> None:
            if is_wanted() and self._clock.now_s < self.away_until_s:
                process.later(next(waits_s), attempt)  # no absence is as long as they are together
                return
            self.shelf.is_full = self._clock.now_s < self.full_until_s
            act()

        mean_s = MEAN_SLOW_S if self._clock.now_s < self.slow_until_s else MEAN_S
        process.later(self._rng.expovariate(1 / mean_s), attempt)


class Line:
    """Things that are done one after the other."""

    def __init__(self, begin: Callable[[object], None]) -> None:
        self._begin = begin
        self.waiting: deque = deque()
        self.under_way = None

    def put(self, what: object) -> None:
        self.waiting.append(what)
        self._next()

    def done(self) -> None:
        self.under_way = None
        self._next()

    def _next(self) -> None:
        if self.under_way is None and self.waiting:
            self.under_way = self.waiting.popleft()
            self._begin(self.under_way)
