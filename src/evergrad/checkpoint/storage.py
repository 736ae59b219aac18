"""Files below a URL, wherever that is, with one kind of error and with patience.

What lies underneath is one of two `Backend`s, a folder of this machine (`local.py`) or what fsspec reaches
(`remote.py`). Here is when it is asked again, and what its errors are called.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeVar

from evergrad.errors import ConfigError, StorageError

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
HOPELESS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
    errno.ENOSYS,
}  # fmt: skip
"""Of a call to the system: asking again will not help."""
SAYS_FULL = re.compile(r"no space left|disk full|storage ?full|quota ?exceeded|insufficient ?storage", re.IGNORECASE)
NO_KEYS = {"NoCredentialsError", "PartialCredentialsError"}
"""Names of errors of libraries that are not imported here."""


class Backend(Protocol):
    """What a kind of storage must do; paths are relative, with `/`. Errors are its own: `Storage` translates them."""

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file of these parts; when this returns it is durable, before it is not there at all."""

    def put_new(self, path: str, data: bytes) -> bool:
        """The same if there is no such file yet, and True; False if there is one."""

    def read(self, path: str) -> bytes:
        """A whole file."""

    def read_into(self, path: str, buffer: memoryview) -> int:
        """Fill `buffer` from a file's beginning; returns the file's size, which may be more or less."""

    def writer(self, path: str) -> AbstractContextManager[BinaryIO]:
        """A file written piece by piece; it is there when the block has ended well."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The size of each file below a folder, however deep; nothing if there is no such folder."""

    def folders(self) -> list[str]:
        """The folders right below the URL."""

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""

    def remove_if_empty(self, folder: str) -> None:
        """Remove a folder, if it is there and nothing is in it."""

    def close(self) -> None:
        """Let connections go."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How patient to be: `tries` in all, the first wait `first_s` long, each next twice that, up to `longest_s`."""

    tries: int = 8
    first_s: float = 0.5
    longest_s: float = 8.0

    def waits_s(self) -> Iterator[float]:
        """How long to wait before each try but the first."""
        return (min(self.first_s * 2**i, self.longest_s) for i in range(self.tries - 1))


IMPATIENT = Retry(tries=3)
"""For commands, where somebody waits for the answer."""


class Storage:
    """The files below one URL.

    Every call may raise `StorageError`, after having tried as often as `retry` says where that can help.

    Args:
        url: a folder of this machine, as a path or `file://`, or what fsspec knows, as `s3://bucket/folder`.
        retry: how often to try.
        sleep: waits; what it raises ends the trying.
        backend: instead of the one that the URL asks for.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        retry: Retry = Retry(),
        sleep: Callable[[float], object] = time.sleep,
        backend: Backend | None = None,
    ) -> None:
        self.url = absolute_url(url)
        self._retry, self._sleep = retry, sleep
        self._backend = backend if backend is not None else _backend(self.url)

    def __enter__(self) -> "Storage":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let connections go."""
        self._backend.close()

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file, whole or not at all, over one that is there; when this returns it is durable."""
        self._patiently("write", path, lambda: self._backend.put(path, parts))

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a file if there is none of that name; returns whether there is one with this content now."""
        return self._patiently("write", path, lambda: self._backend.put_new(path, data)) or self.read(path) == data

    def read(self, path: str) -> bytes:
        """A whole file."""
        return self._patiently("read", path, lambda: self._backend.read(path))

    def read_into(self, path: str, buffer: memoryview) -> None:
        """Fill `buffer` with a file that must be of its size."""
        size = self._patiently("read", path, lambda: self._backend.read_into(path, buffer))
        if size != len(buffer):
            raise StorageError(f"{self.where(path)} has {size} bytes and should have {len(buffer)}")

    @contextmanager
    def writer(self, path: str) -> Iterator["Sink"]:
        """A file written piece by piece, which is there when the block has ended well. It is tried once."""
        with ExitStack() as stack:
            with self._translating(path):
                file = stack.enter_context(self._backend.writer(path))
            yield Sink(file, lambda: self._translating(path))
            written = stack.pop_all()
        with self._translating(path):
            written.close()

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The size of each file below a folder, by its path; nothing if there is no such folder."""
        return self._patiently("list", folder, lambda: self._backend.sizes(folder))

    def folders(self) -> list[str]:
        """The names of the folders right below the URL; none if it is not there."""
        return self._patiently("list", "", self._backend.folders)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        self._patiently("remove", path, lambda: self._backend.remove(path))

    def remove_if_empty(self, folder: str) -> None:
        """Remove a folder in which nothing is; where folders are but names there is nothing to do."""
        self._patiently("remove", folder, lambda: self._backend.remove_if_empty(folder))

    def where(self, path: str) -> str:
        """A path as people should read it."""
        return f"{self.url}/{path}" if path else self.url

    @contextmanager
    def _translating(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            raise self._translated("write", path, exc)[0] from exc

    def _patiently(self, verb: str, path: str, work: Callable[[], T]) -> T:
        waits_s = self._retry.waits_s()
        while True:
            try:
                return work()
            except Exception as exc:
                error, is_worth_another_try = self._translated(verb, path, exc)
                wait_s = next(waits_s, None) if is_worth_another_try else None
                if wait_s is None:
                    raise error from exc
            self._sleep(wait_s)

    def _translated(self, verb: str, path: str, exc: Exception) -> tuple[StorageError, bool]:
        """The error to raise, and whether to try again first."""
        at, code = self.where(path), getattr(exc, "errno", None)
        reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
        if code in FULL or SAYS_FULL.search(reason):
            return StorageError(f"cannot {verb} {at}: the storage is full ({reason}); make room", is_full=True), False
        if isinstance(exc, FileNotFoundError):
            return StorageError(f"cannot {verb} {at}: there is no such file or bucket", is_missing=True), False
        if type(exc).__name__ in NO_KEYS:
            what = "there are no keys; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            return StorageError(f"cannot {verb} {at}: {what}"), False
        if isinstance(exc, PermissionError):
            return StorageError(f"cannot {verb} {at}: {reason}; check who may use it, and the keys"), False
        return StorageError(f"cannot {verb} {at}: {reason}"), code not in HOPELESS


class Sink:
    """What a piece by piece is written to."""

    def __init__(self, file: BinaryIO, translating: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._translating = file, translating

    def write(self, data: Buffer) -> None:
        """Write the next piece."""
        with self._translating():
            self._file.write(data)


def absolute_url(url: object) -> str:
    """A URL as processes pass it on: an absolute path of this machine, or `scheme://...` without a slash at the end.

    Raises:
        ConfigError: it is none.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else ""
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{url!r} is no place for files; give a folder, or a URL as s3://bucket/folder")
    if re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", text):
        raise ConfigError(f"{text!r} reads like a URL but for a slash; write scheme://..., or ./{text} for a folder")
    scheme, is_url, rest = text.partition("://")
    if not is_url or scheme == "file":
        return os.path.abspath(os.path.expanduser(rest if is_url else text))
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) or not rest.strip("/"):
        raise ConfigError(f"{text!r} is no place for files; give a folder, or a URL as s3://bucket/folder")
    return f"{scheme}://{rest.rstrip('/')}"


def shared_url(url: object) -> str:
    """As `absolute_url`, for a place that several processes use.

    Raises:
        ConfigError: it is none, or the others cannot see it.
    """
    found = absolute_url(url)
    if found.startswith("memory://"):
        raise ConfigError(f"{found} is in the memory of one process; give a folder, or a URL as s3://bucket/folder")
    return found


def is_local(url: str) -> bool:
    """Whether an absolute URL is a folder of this machine."""
    return "://" not in url


def _backend(url: str) -> Backend:
    """The one place that knows which there are; imports what it needs."""
    if is_local(url):
        from evergrad.checkpoint.local import LocalFolder

        return LocalFolder(url)
    from evergrad.checkpoint.remote import Remote

    return Remote(url)


def missing(sizes: Mapping[str, int], wanted: Mapping[str, int]) -> str | None:
    """What is wrong with the first file that is not there or of another size; None if all are."""
    for path, size in wanted.items():
        if path not in sizes:
            return f"{path} is missing"
        if sizes[path] != size:
            return f"{path} has {sizes[path]} bytes and should have {size}"
    return None
