"""A new folder for people to use, as a saved model: there as a whole or not at all, instead of an old one of its kind.

On this machine the files are written to a folder of another name, which is renamed. Where there are but objects, the
file that makes the folder one of its kind is removed first and written last.
"""

import glob
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from evergrad.checkpoint.storage import Buffer, Storage, absolute_url, is_local
from evergrad.errors import ConfigError


class Kind(NamedTuple):
    """A kind of folder."""

    word: str
    """What people call it."""
    marker: str
    """The file without which it is none; written last."""
    is_its: Callable[[str], bool]
    """Whether a path inside is one that such a folder has."""


class Writable(Protocol):
    """What pieces of a file are written to."""

    def write(self, data: Buffer, /) -> object:
        """Write the next piece."""


class Output(Protocol):
    """A folder that is being written."""

    def writer(self, name: str) -> AbstractContextManager[Writable]:
        """One of its files, written piece by piece."""


@contextmanager
def new_folder(target: str | os.PathLike[str], kind: Kind) -> Iterator[Output]:
    """A folder that appears at `target` when the block ends well, instead of one of its kind that is there.

    Args:
        target: a path of this machine or a URL.
        kind: what it will be.

    Raises:
        ConfigError: something else is at the target, or it cannot be written; nothing there was changed.
        StorageError: the URL cannot be written.
    """
    url = absolute_url(target)
    if is_local(url):
        with _local(Path(url), kind) as output:
            yield output
    else:
        with Storage(url) as storage:
            yield from _remote(storage, kind)


class LocalOutput:
    """A folder of this machine that nobody else sees yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        """One of its files."""
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


class RemoteOutput:
    """A folder of objects."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.names: set[str] = set()
        """Of what was written."""

    def writer(self, name: str) -> AbstractContextManager[Writable]:
        """One of its files."""
        self.names.add(name)
        return self._storage.writer(name)


@contextmanager
def _local(path: Path, kind: Kind) -> Iterator[Output]:
    path = _target(path, kind)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    _remove_remains(path)
    try:
        temporary.mkdir(parents=True)
        yield LocalOutput(temporary)
        _put(temporary, path)
    except OSError as exc:
        raise ConfigError(f"cannot save a {kind.word} to {path}: {exc.strerror or exc}; give another path") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remote(storage: Storage, kind: Kind) -> Iterator[Output]:
    before = storage.sizes()
    _check_strangers(storage.url, before, kind)
    storage.remove(kind.marker)
    output = RemoteOutput(storage)
    yield output
    for name in before.keys() - output.names:
        storage.remove(name)


def _target(path: Path, kind: Kind) -> Path:
    """Where the folder goes: a link stays, what it points to is replaced."""
    try:
        target = path.resolve()
        if not target.exists():
            return target
        if target.is_dir():
            inside = [file.relative_to(target).as_posix() for file in target.rglob("*") if not file.is_dir()]
            _check_strangers(str(path), inside or [file.name for file in target.iterdir()], kind)
            return target
    except (OSError, RuntimeError) as exc:  # before Python 3.13 a loop of links is a RuntimeError
        raise ConfigError(f"cannot save a {kind.word} to {path}: {exc}; give another path") from exc
    raise ConfigError(f"{path} is there and holds no {kind.word}; remove it or save to another path")


def _check_strangers(where: str, names: Collection[str], kind: Kind) -> None:
    """See that files there are those of one of its kind."""
    strangers = sorted(name for name in names if not kind.is_its(name))
    if kind.marker not in names and names:
        raise ConfigError(f"{where} is there and holds no {kind.word}; remove it or save to another path")
    if strangers:
        raise ConfigError(f"{where} holds a {kind.word}, and {strangers[0]} besides; move that or save to another path")


def _remove_remains(path: Path) -> None:
    """Remove what savings to the same path left behind whose process, on this machine, was ended in the middle."""
    for remains in path.parent.glob(f".{glob.escape(path.name)}.*"):
        found = re.fullmatch(r"\.(\d+)\.[0-9a-f]{8}(\.old)?", remains.name.removeprefix(f".{path.name}"))
        if found and not Path(f"/proc/{found[1]}").exists() and (path.is_dir() or not found[2]):
            shutil.rmtree(remains, ignore_errors=True)


def _put(temporary: Path, path: Path) -> None:
    """Rename the new folder into place; an old one goes only after that."""
    old = None
    if path.exists():
        old = temporary.with_name(f"{temporary.name}.old")
        path.rename(old)
    temporary.rename(path)
    if old is not None:
        shutil.rmtree(old)
