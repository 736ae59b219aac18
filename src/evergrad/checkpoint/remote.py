"""Storage that fsspec reaches: the one place that imports it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast
from uuid import uuid4

import fsspec.core

from evergrad.checkpoint.storage import Buffer
from evergrad.errors import ConfigError, StorageError

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"}
"""A put there is whole or not at all. Elsewhere a file is written under another name and renamed."""
EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Which extra of this package brings what a scheme needs."""
OPTIONS: dict[str, dict[str, Any]] = {
    # retried by `Storage` alone; a reply may take as long as a file on a slow line
    "s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 120}},
}


class Remote:
    """The `Backend` of a URL.

    Raises:
        ConfigError: nothing here can reach it.
    """

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        options = OPTIONS.get("s3" if scheme == "s3a" else scheme, {})
        try:
            fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as exc:
            extra = f"pip install 'evergrad[{EXTRAS[scheme]}]'" if scheme in EXTRAS else "install what fsspec wants"
            raise ConfigError(f"{url} cannot be used: {exc}; {extra}, or give another place") from exc
        except Exception as exc:  # whatever its protocol raises when it connects
            raise StorageError(f"{url} cannot be reached: {str(exc) or type(exc).__name__}") from exc
        if hasattr(fs, "retries"):
            fs.retries = 1
        self._fs: Any = fs
        self._root = str(root)
        self._is_whole = scheme in OBJECT_STORES

    def put(self, path: str, parts: Sequence[Buffer]) -> None:
        """Put a file at once."""
        data = bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
        with self._named(path) as name:
            self._fs.pipe_file(name, data)

    def put_new(self, path: str, data: bytes) -> bool:
        """Put a file if there is none; on object stores that know the condition no two writers both succeed."""
        if self._fs.exists(self._at(path)):
            return False
        if not self._is_whole:
            self.put(path, [data])
            return True
        try:
            self._fs.pipe_file(self._at(path), data, mode="create")
        except Exception:
            if self._fs.exists(self._at(path)):
                return False
            raise
        return True

    def read(self, path: str) -> bytes:
        """A whole file."""
        return cast(bytes, self._fs.cat_file(self._at(path)))

    def read_into(self, path: str, buffer: memoryview) -> int:
        """Fill the buffer; returns the size of the file."""
        data = self.read(path)
        if len(data) == len(buffer):
            buffer[:] = data
        return len(data)

    @contextmanager
    def writer(self, path: str) -> Iterator[BinaryIO]:
        """A file that is sent in parts and there when complete."""
        with self._named(path) as name:
            if not self._is_whole:
                with self._fs.open(name, "wb") as file:
                    yield file
                return
            file = self._fs.open(name, "wb", autocommit=False)
            try:
                yield file
            except BaseException:
                file.discard()
                file.closed = True  # or it is written all the same when it is forgotten
                raise
            file.close()
            file.commit()

    def sizes(self, folder: str) -> dict[str, int]:
        """The size of each file below a folder."""
        try:
            found = self._fs.find(self._at(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {self._relative(path): int(info["size"]) for path, info in found.items() if info["type"] == "file"}

    def folders(self) -> list[str]:
        """The folders right below the URL."""
        try:
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [self._relative(entry["name"].rstrip("/")) for entry in found if entry["type"] == "directory"]

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def remove_if_empty(self, folder: str) -> None:
        """Remove a folder with nothing in it; in an object store there is none."""
        with suppress(OSError):
            if not self._is_whole and not self._fs.ls(self._at(folder), detail=False):
                self._fs.rmdir(self._at(folder))

    def close(self) -> None:
        """Close connections, where fsspec would leave them open."""
        creator = getattr(self._fs, "_s3creator", None)
        if creator is not None:
            self._fs.close_session(self._fs.loop, creator)

    @contextmanager
    def _named(self, path: str) -> Iterator[str]:
        """The name to write to: the file's, or one that becomes it at the end."""
        target = self._at(path)
        if self._is_whole:
            yield target
            return
        folder = target.rpartition("/")[0]
        self._fs.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.0.{uuid4().hex[:8]}.part"
        try:
            yield temporary
            with suppress(FileNotFoundError):
                self._fs.rm_file(target)  # where renaming does not replace
            self._fs.mv(temporary, target)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root.rstrip("/") + "/")
