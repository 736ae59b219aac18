"""What a pserver's process has threads for: pieces go out to storage, and come in from it, while its loop turns."""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from evergrad.checkpoint.files import write_piece
from evergrad.checkpoint.manifest import read_manifest
from evergrad.checkpoint.pieces import Piece
from evergrad.checkpoint.reader import overlapping, pieces
from evergrad.checkpoint.storage import Retry, Storage
from evergrad.errors import CheckpointError, EvergradError, StorageError
from evergrad.messages import FileInfo, Obstacle, Place, Progress, Restore, Schema

LOOK_S = 0.1
"""A thread that waits looks this often whether it is still wanted."""
CLOSE_S = 5.0
PATIENT = Retry()


class ToWrite(NamedTuple):
    """A piece of the checkpoint `serial`, and where it goes."""

    url: str
    serial: int
    schema: Schema
    place: Place
    piece: Piece


class Saved(NamedTuple):
    """What came of a piece: its files, or why there are none; and how long a processor worked on it."""

    serial: int
    files: tuple[FileInfo, ...] = ()
    failure: str | None = None
    processor_s: float = 0.0


class Facts(NamedTuple):
    """What is known of a checkpoint before its pieces come."""

    progress: Progress
    updates: dict[str, int]


class Finished(NamedTuple):
    """All pieces have come, or no more will (`failure`)."""

    bytes_read: int = 0
    failure: str | None = None
    obstacle: Obstacle = Obstacle.DAMAGED


class Unwanted(Exception):
    """What this thread does is not wanted any more."""


Write = Callable[[Storage, int, Schema, Place, Piece], tuple[FileInfo, ...]]


class Saver:
    """Writes pieces one after the other: one is being written, one may wait.

    Args:
        write: writes a piece and returns when its files are durable.
        retry: how often to try.
    """

    def __init__(self, write: Write = write_piece, retry: Retry = PATIENT) -> None:
        self.wanted: int | None = None
        """The serial that is to be saved: what belongs to another one is dropped, also while it is tried again."""
        self._write, self._retry = write, retry
        self._storage: Storage | None = None
        self._url, self._writing = "", -1
        self._waiting: queue.Queue[ToWrite | None] = queue.Queue(1)
        self._results: queue.SimpleQueue[Saved | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        """Whether no piece waits."""
        return self._waiting.empty()

    def put(self, job: ToWrite) -> None:
        """Have this written; there is room for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evergrad-saver", daemon=True)
            self._thread.start()
        self._waiting.put_nowait(job)

    def results(self) -> list[Saved]:
        """What has been written since the last call.

        Raises:
            BaseException: an error that nobody expected ended the thread.
        """
        results = []
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    def close(self) -> None:
        """Write no more; what is being written is waited for a moment."""
        self.wanted = None
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        try:
            while (job := self._waiting.get()) is not None:
                self._writing = job.serial
                began_s = time.thread_time()
                with suppress(Unwanted):
                    self._check_wanted()
                    saved = self._written(job)
                    self._results.put(saved._replace(processor_s=time.thread_time() - began_s))
                del job  # or its piece would stay until the next one comes
        except BaseException as exc:  # the loop raises it
            self._results.put(exc)
        finally:
            if self._storage is not None:
                self._storage.close()

    def _written(self, job: ToWrite) -> Saved:
        try:
            if self._storage is None or self._url != job.url:
                self._storage, self._url = Storage(job.url, self._retry, self._sleep), job.url
            return Saved(job.serial, self._write(self._storage, job.serial, job.schema, job.place, job.piece))
        except EvergradError as exc:
            return Saved(job.serial, failure=str(exc))
        except MemoryError:
            return Saved(job.serial, failure="there is no memory left to write it")

    def _sleep(self, seconds: float) -> None:
        _sleep_while(seconds, self._check_wanted)

    def _check_wanted(self) -> None:
        if self.wanted != self._writing:
            raise Unwanted


class Loader:
    """Reads what a pserver is to load, a piece ahead of what was taken.

    Args:
        restore: what the master has said; its source is not None.
        retry: how often to try what fails.
    """

    def __init__(self, restore: Restore, retry: Retry = PATIENT) -> None:
        self.restore = restore
        self._retry = retry
        self._is_wanted = True
        self._read: queue.Queue[Facts | Piece | Finished | BaseException] = queue.Queue(1)
        self._thread = threading.Thread(target=self._run, name="evergrad-loader", daemon=True)
        self._thread.start()

    def take(self) -> Facts | Piece | Finished | None:
        """The next of what was read: first facts, then pieces, then that it is finished; None if it is not there yet.

        Raises:
            BaseException: an error that nobody expected ended the thread.
        """
        try:
            item = self._read.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Read no more; what hangs is left to itself."""
        self._is_wanted = False

    def join(self) -> None:
        """Wait a moment for the end of the thread."""
        self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        try:
            self._put(self._load())
        except Unwanted:
            pass
        except BaseException as exc:  # the loop raises it
            with suppress(Unwanted):
                self._put(exc)

    def _load(self) -> Finished:
        restore, source = self.restore, self.restore.source
        assert source is not None  # or there is nothing to load
        try:
            with Storage(source.url, self._retry, self._sleep) as storage:
                # tables go by name, and are numbered as in the job's model
                manifest = msgspec.structs.replace(read_manifest(storage, source.serial), schema=restore.schema)
                self._put(Facts(manifest.progress, manifest.updates))
                for piece in pieces(storage, manifest, restore.place, restore.places):
                    self._put(piece)
                return Finished(sum(file.bytes for file in overlapping(manifest, restore.place, restore.places)))
        except EvergradError as exc:
            return Finished(failure=str(exc), obstacle=obstacle_of(exc))
        except MemoryError:
            return Finished(failure="there is no memory left to read it", obstacle=Obstacle.HERE)

    def _put(self, item: Facts | Piece | Finished | BaseException) -> None:
        while True:
            self._check_wanted()
            with suppress(queue.Full):
                return self._read.put(item, timeout=LOOK_S)

    def _sleep(self, seconds: float) -> None:
        _sleep_while(seconds, self._check_wanted)

    def _check_wanted(self) -> None:
        if not self._is_wanted:
            raise Unwanted


def obstacle_of(error: EvergradError | MemoryError) -> Obstacle:
    """What kept a checkpoint from being restored."""
    match error:
        case StorageError(is_missing=False):
            return Obstacle.AWAY
        case CheckpointError():
            return Obstacle.DAMAGED
        case _:
            return Obstacle.HERE


def _sleep_while(seconds: float, check: Callable[[], None]) -> None:
    waiting = threading.Event()
    while seconds > 0:
        check()
        waiting.wait(min(seconds, LOOK_S))
        seconds -= LOOK_S
