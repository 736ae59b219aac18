"""One job at a time makes checkpoints at a place.

A folder of this machine is locked, and free as soon as the process that holds it is gone. Elsewhere there are no locks:
a job counts up in a file there every few seconds, and another one that finds the file looks for a while whether it
changes. A job that has been away for so long that another has taken its place is told when it looks next.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

import msgspec

from evergrad.checkpoint.storage import Retry, Storage, is_local
from evergrad.errors import ConfigError, Fenced, StorageError

LOCK, CLAIM = ".evergrad-lock", "claimed.json"
RENEW_S = 5.0
"""How often a claim is to be renewed."""
LOCAL_WAIT_S = 10.0
"""A job whose launcher is killed takes a moment to end."""
REMOTE_WAIT_S = 15.0
"""A file that has not changed for so long belongs to no job that runs."""
LOOK_S = 0.5
ONCE = Retry(tries=1)


class Claim(Protocol):
    """A job's claim to a place."""

    def take(self) -> None:
        """Claim it, after having waited for a job that has just ended.

        Raises:
            ConfigError: another job has it.
            StorageError: the place cannot be written to.
        """

    def renew(self) -> None:
        """Hold on to it, or take it if that was not possible before.

        Raises:
            Fenced: another job has taken it.
            StorageError: the place cannot be written to.
        """

    def release(self) -> None:
        """Let others take it."""


def claim(url: str, job: str) -> Claim:
    """The claim of `job` to an absolute URL, not taken yet."""
    return LocalClaim(url, job) if is_local(url) else RemoteClaim(Storage(url, ONCE), job)


class LocalClaim:
    """A locked file in the folder. A newer job of the same process takes its place from an older one."""

    _of_process: ClassVar[dict[str, "LocalClaim"]] = {}
    _guard = threading.Lock()

    def __init__(self, folder: str, job: str, wait_s: float = LOCAL_WAIT_S) -> None:
        self._folder, self._job, self._wait_s = folder, job, wait_s
        self._file: int | None = None
        self._is_lost = False

    def take(self) -> None:
        """As `Claim.take`."""
        until_s = time.monotonic() + self._wait_s
        while (holder := self._try()) is not None:
            if time.monotonic() >= until_s:
                raise ConfigError(_taken(self._folder, holder))
            time.sleep(LOOK_S)

    def renew(self) -> None:
        """As `Claim.renew`."""
        if self._is_lost:
            raise Fenced(f"a newer job of this process makes its checkpoints in {self._folder} now")
        if self._file is None and (holder := self._try()) is not None:
            raise Fenced(_taken(self._folder, holder))

    def release(self) -> None:
        """As `Claim.release`."""
        with self._guard:
            if self._file is not None:
                os.close(self._file)
                self._file = None
                del self._of_process[self._folder]

    def _try(self) -> str | None:
        """Lock it; the name of the job that holds it if that cannot be done now."""
        with self._guard:
            before = self._of_process.get(self._folder)
            try:
                if before is not None:
                    self._file, before._file, before._is_lost = before._file, None, True
                elif (holder := self._lock()) is not None:
                    return holder
                assert self._file is not None
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, self._job.encode(), 0)
            except OSError as exc:
                raise StorageError(
                    f"cannot make checkpoints in {self._folder}: {exc.strerror}; give another place"
                ) from exc
            finally:
                if self._file is not None:
                    self._of_process[self._folder] = self
        return None

    def _lock(self) -> str | None:
        os.makedirs(self._folder, exist_ok=True)
        file = os.open(os.path.join(self._folder, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode(errors="replace")
            os.close(file)
            return holder
        except OSError:
            os.close(file)
            raise
        self._file = file
        return None


class _Beat(msgspec.Struct, frozen=True):
    """What a claim's file says: which job, none once it has let go, and a count that it raises."""

    job: str
    count: int = 0


class RemoteClaim:
    """A file that changes as long as the job runs.

    Args:
        storage: the place.
        job: the job's name.
        sleep: waits.
    """

    def __init__(self, storage: Storage, job: str, sleep: Callable[[float], object] = time.sleep) -> None:
        self._storage, self._job, self._sleep = storage, job, sleep
        self._count = 0

    def take(self) -> None:
        """As `Claim.take`."""
        found = self._read()
        if found is None and self._storage.put_new(CLAIM, msgspec.json.encode(_Beat(self._job))):
            return
        waited_s = 0.0
        while (now := self._read()) is not None and now.job not in ("", self._job):
            if found is not None and now != found:
                raise ConfigError(_taken(self._storage.url, now.job))
            if waited_s >= REMOTE_WAIT_S:
                break
            found, waited_s = now, waited_s + LOOK_S
            self._sleep(LOOK_S)
        self._put(self._job)

    def renew(self) -> None:
        """As `Claim.renew`."""
        found = self._read()
        if found is not None and found.job not in ("", self._job):
            raise Fenced(_taken(self._storage.url, found.job))
        self._put(self._job)

    def release(self) -> None:
        """As `Claim.release`."""
        try:
            self.renew()
            self._put("")
        except (Fenced, StorageError):
            pass
        finally:
            self._storage.close()

    def _read(self) -> _Beat | None:
        try:
            return msgspec.json.decode(self._storage.read(CLAIM), type=_Beat)
        except msgspec.MsgspecError:
            return _Beat("")
        except StorageError as exc:
            if exc.is_missing:
                return None
            raise

    def _put(self, job: str) -> None:
        self._count += 1
        self._storage.put(CLAIM, [msgspec.json.encode(_Beat(job, self._count))])


def _taken(place: str, job: str) -> str:
    return f"job {job} makes its checkpoints in {place}; give each job a place of its own, or end that one first"
