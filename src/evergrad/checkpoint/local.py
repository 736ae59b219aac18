"""Storage in a folder of this machine: a file is written under another name, made durable, and renamed."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from evergrad.checkpoint.storage import Buffer

MOST_AT_ONCE = 1 << 30
"""Bytes of one call to read; the system gives no more than 2 GiB."""
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalFolder:
    """The `Backend` of a folder."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file; after a crash at any moment it is there whole or not at all."""
        with self.writer(path) as file:
            for part in parts:
                file.write(part)

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a file if there is none; two processes that do so at once do not both succeed."""
        target = self._root / path
        with self._temporary(target) as (temporary, file):
            file.write(data)
            _sync(file)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as exc:
                if exc.errno not in NO_LINKS:
                    raise
                if target.exists():  # without links on this file system: not safe against another writer
                    return False
                os.rename(temporary, target)
        _sync_folder(target.parent)
        return True

    def read(self, path: str) -> bytes:
        """A whole file."""
        return (self._root / path).read_bytes()

    def read_into(self, path: str, buffer: memoryview) -> int:
        """Fill the buffer; returns the size of the file."""
        with (self._root / path).open("rb", buffering=0) as file:
            done = 0
            while done < len(buffer) and (count := file.readinto(buffer[done : done + MOST_AT_ONCE])):
                done += count
            return done if done < len(buffer) else os.fstat(file.fileno()).st_size

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        """A file that gets its name when it is complete and durable."""
        target = self._root / path
        with self._temporary(target) as (temporary, file):
            yield file
            _sync(file)
            os.rename(temporary, target)
        _sync_folder(target.parent)

    def sizes(self, folder: str) -> dict[str, int]:
        """The size of each file below a folder."""
        found: dict[str, int] = {}
        for at, _, names in os.walk(self._root / folder, onerror=_raise_unless_missing):
            for name in names:
                path = Path(at, name)
                with suppress(FileNotFoundError):  # removed meanwhile
                    found[path.relative_to(self._root).as_posix()] = path.stat().st_size
        return found

    def folders(self) -> list[str]:
        """The folders in this one."""
        try:
            return [entry.name for entry in os.scandir(self._root) if entry.is_dir()]
        except FileNotFoundError:
            return []

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        (self._root / path).unlink(missing_ok=True)

    def remove_if_empty(self, folder: str) -> None:
        """Remove a folder with nothing in it."""
        try:
            (self._root / folder).rmdir()
        except OSError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def close(self) -> None:
        """Nothing is held."""

    @contextmanager
    def _temporary(self, target: Path) -> Iterator[tuple[Path, BinaryIO]]:
        """A new file beside the target; gone afterwards if it was not renamed."""
        _make_folders(target.parent)
        temporary = target.with_name(f".{os.getpid()}.{os.urandom(4).hex()}.part")
        try:
            with temporary.open("xb") as file:
                yield temporary, file
        finally:
            temporary.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    """Make a file's content durable."""
    file.flush()
    os.fsync(file.fileno())


def _make_folders(folder: Path) -> None:
    """Make a folder and those above it, each durable in the one above."""
    if folder.is_dir():
        return
    if folder != folder.parent:
        _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _raise_unless_missing(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError):
        raise exc
