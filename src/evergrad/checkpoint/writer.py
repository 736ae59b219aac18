"""Writing the pieces of a cut in the background: while the disk takes one, the next is made ready."""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from evergrad.checkpoint.files import write_piece
from evergrad.checkpoint.pieces import Piece
from evergrad.checkpoint.storage import Storage
from evergrad.messages import FileInfo, Place, Schema

AT_ONCE = 2


class Writer:
    """Writes one place's pieces of one cut, two at a time. Its methods belong to one thread.

    Args:
        storage: where the checkpoint goes.
        serial: which.
        schema: the model.
        place: whose pieces these are.
        on_done: called after each piece, in another thread: to wake who waits for room or the end.

    Memory: two pieces, each once more as it is written.
    """

    def __init__(
        self, storage: Storage, serial: int, schema: Schema, place: Place, on_done: Callable[[], object] = lambda: None
    ) -> None:
        self._storage, self._serial, self._schema, self._place = storage, serial, schema, place
        self._on_done = on_done
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="checkpoint-writer")
        self._writing: list[Future[tuple[FileInfo, ...]]] = []
        self._files: list[FileInfo] = []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_room(self) -> bool:
        """Whether `write` would return at once."""
        return sum(not future.done() for future in self._writing) < AT_ONCE

    @property
    def is_idle(self) -> bool:
        """Whether `finish` would return at once."""
        return all(future.done() for future in self._writing)

    def write(self, piece: Piece) -> None:
        """Write a piece; waits for room. Its arrays must not be changed any more.

        Raises:
            StorageError: a piece before could not be written.
        """
        while not self.has_room:
            wait(self._writing, return_when=FIRST_COMPLETED)
            self._collect()
        self._collect()
        future = self._threads.submit(write_piece, self._storage, self._serial, self._schema, self._place, piece)
        future.add_done_callback(lambda _: self._on_done())
        self._writing.append(future)

    def finish(self) -> tuple[FileInfo, ...]:
        """The files of all pieces, by path; waits until they are durable.

        Raises:
            StorageError: a piece could not be written.
        """
        wait(self._writing)
        self._collect()
        return tuple(sorted(self._files, key=lambda file: file.path))

    def close(self) -> None:
        """Begin no other piece, and wait for those that are being written."""
        self._threads.shutdown(cancel_futures=True)

    def _collect(self) -> None:
        done = [future for future in self._writing if future.done()]
        self._writing = [future for future in self._writing if not future.done()]
        for future in done:
            self._files += future.result()
