"""The record in a file, for a job on one machine: one master at a time has the lock."""

import fcntl
import os
import time
from pathlib import Path

from evergrad.errors import ConfigError, Fenced, Unavailable

RECORD, LOCK = "record.json", "record.lock"
WAIT_S = 10.0
POLL_S = 0.05


class FileStore:
    """The record of the job in a folder; held until `close` or the end of the process.

    Raises:
        ConfigError: the folder cannot be used.
        Fenced: another master has the lock and keeps it.
    """

    def __init__(self, folder: Path, wait_s: float = WAIT_S) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as exc:
            raise ConfigError(f"cannot keep the record in {folder}: {exc.strerror}; choose another folder") from exc
        self._take_lock(time.monotonic() + wait_s)

    def _take_lock(self, until_s: float) -> None:
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as exc:
                if time.monotonic() >= until_s:
                    os.close(self._lock)
                    raise Fenced(f"another master leads the job of {self._folder}; end it first") from exc
            time.sleep(POLL_S)

    def read(self) -> bytes | None:
        """What was written last; None before the first time.

        Raises:
            Unavailable: it cannot be read.
        """
        try:
            return (self._folder / RECORD).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise Unavailable(f"cannot read the job's record in {self._folder}: {exc.strerror}") from exc

    def write(self, record: bytes) -> None:
        """Replace what is there; durable when this returns.

        Raises:
            Unavailable: it cannot be written now.
        """
        temporary = self._folder / f".{RECORD}.{os.getpid()}"
        try:
            with temporary.open("wb") as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / RECORD)
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as exc:
            raise Unavailable(f"cannot write the job's record in {self._folder}: {exc.strerror}") from exc

    def close(self) -> None:
        """Let another master take the lock."""
        os.close(self._lock)
