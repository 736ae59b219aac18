"""A saved model: a folder that holds what inference needs and nothing else.

    MODEL/
      dense.safetensors            parameters and buffers, by their names in the torch model
      tables/NAME.safetensors      `keys` int64 (n,) and `values` float32 (n, dim), sorted by (slot, key)
      manifest.json                the tables, how to answer keys without a row, and each file's size and checksum

The manifest is written last and the folder appears under its name as a whole, or not at all. The bytes depend on the
model alone: not on the number of pservers, the time or the machine.
"""

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from evergrad.errors import CheckpointError, ConfigError
from evergrad.init_rows import Initializer
from evergrad.messages import AnyArray, Floats, Keys, TableSpec

FORMAT = "evergrad-model-1"
MANIFEST, DENSE, TABLES = "manifest.json", "dense.safetensors", "tables"


class SavedFile(msgspec.Struct, frozen=True):
    """Size and checksum (BLAKE2b, 16 bytes, in hexadecimal) of a file of the model."""

    bytes: int
    blake2b: str


class SavedTable(msgspec.Struct, frozen=True):
    """A table of the model: `seed` and `initializer` give the first value of a key without a row."""

    file: str
    dim: int
    rows: int
    seed: int
    initializer: Initializer
    unseen_zero: bool


class Manifest(msgspec.Struct, frozen=True):
    """What the folder holds."""

    format: str
    tables: dict[str, SavedTable]
    files: dict[str, SavedFile]


class ModelWriter:
    """Writes one model into a folder that nobody else sees yet."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._tables: dict[str, SavedTable] = {}
        self._files: dict[str, SavedFile] = {}
        (folder / TABLES).mkdir()

    def dense(self, write: Callable[[Path], None]) -> None:
        """Have `write` put the dense values into the file it is given."""
        path = self._folder / DENSE
        try:
            write(path)
            path.chmod((path.parent / TABLES).stat().st_mode & 0o666)  # the library makes it private
            with path.open("rb+") as file:
                _flush(file)
        except SafetensorError as exc:  # what the library makes of a full disk
            raise OSError(str(exc)) from exc
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16)
        self._files[DENSE] = SavedFile(path.stat().st_size, digest.hexdigest())

    def table(self, spec: TableSpec, rows: int, keys: Iterable[Keys], values: Iterable[Floats]) -> None:
        """Write a table piece by piece, first all keys, then all values.

        Raises:
            CheckpointError: there were more or fewer than `rows` rows.
        """
        name = f"{TABLES}/{quote(spec.name, safe='')}.safetensors"
        header = _header({"keys": ("I64", [rows]), "values": ("F32", [rows, spec.dim])})
        with (self._folder / name).open("wb") as file:
            hashed = _HashedFile(file)
            hashed.write(header)
            for what, pieces, row_bytes in (("keys", keys, 8), ("values", values, 4 * spec.dim)):
                written = sum(hashed.write_array(piece) for piece in pieces)
                if written != rows * row_bytes:
                    raise CheckpointError(f"table {spec.name!r}: {written} bytes of {what} for {rows} rows; save again")
            _flush(file)
        self._files[name] = hashed.saved()
        self._tables[spec.name] = SavedTable(name, spec.dim, rows, self._seed, spec.initializer, spec.unseen_zero)

    def manifest(self) -> None:
        """Write the manifest: now the model is complete."""
        manifest = Manifest(FORMAT, self._tables, dict(sorted(self._files.items())))
        with (self._folder / MANIFEST).open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
            _flush(file)


@contextmanager
def new_model(path: Path, seed: int) -> Iterator[ModelWriter]:
    """A writer for a model that appears at `path` when the block ends well, instead of a model that is there.

    Raises:
        ConfigError: something that is no model is at `path`, or it cannot be written; nothing there was changed.
    """
    path = _target(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    _remove_remains(path)
    try:
        temporary.mkdir(parents=True)
        writer = ModelWriter(temporary, seed)
        yield writer
        writer.manifest()
        _put(temporary, path)
    except OSError as exc:
        raise ConfigError(f"cannot save a model to {path}: {exc.strerror or exc}; give another path") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Model:
    """A saved model, open for reading.

    Raises:
        CheckpointError: the folder holds no complete model of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
        except FileNotFoundError:
            raise CheckpointError(f"{path} holds no model: there is no {MANIFEST} in it") from None
        except (OSError, msgspec.MsgspecError) as exc:
            raise CheckpointError(f"{path / MANIFEST} cannot be read: {exc}") from exc
        if self.manifest.format != FORMAT:
            raise CheckpointError(f"{path} is of format {self.manifest.format!r}; this version reads {FORMAT!r}")
        for name, saved in self.manifest.files.items():
            size = (path / name).stat().st_size if (path / name).is_file() else 0
            if size != saved.bytes:
                raise CheckpointError(
                    f"{path / name} has {size} bytes and should have {saved.bytes}; copy the model again"
                )

    def verified(self, name: str) -> Path:
        """The path of one of the model's files, its checksum compared. Cost: one reading of the file.

        Raises:
            CheckpointError: it is not as it was written.
        """
        saved = self.manifest.files.get(name)
        try:
            with (self.path / name).open("rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        except OSError as exc:
            raise CheckpointError(f"{self.path / name} cannot be read: {exc.strerror or exc}") from exc
        if saved is None or digest != saved.blake2b:
            raise CheckpointError(f"{self.path / name} has changed since it was written; copy the model again")
        return self.path / name

    def table(self, name: str) -> tuple[Keys, Floats]:
        """A table's keys (n,) and values (n, dim), sorted by (slot, key).

        Raises:
            CheckpointError: the file is not as it was written.
        """
        saved = self.manifest.tables[name]
        try:
            arrays: dict[str, AnyArray] = load_file(self.verified(saved.file))
            keys, values = arrays["keys"], arrays["values"]
        except (OSError, SafetensorError, KeyError) as exc:
            raise CheckpointError(f"{self.path / saved.file} cannot be read: {exc}") from exc
        if keys.shape != (saved.rows,) or values.shape != (saved.rows, saved.dim):
            raise CheckpointError(f"{self.path / saved.file}: {keys.shape} keys and {values.shape} values do not fit")
        return keys, values


class _HashedFile:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._bytes = file, hashlib.blake2b(digest_size=16), 0

    def write(self, data: bytes | memoryview) -> int:
        self._file.write(data)
        self._digest.update(data)
        self._bytes += len(data)
        return len(data)

    def write_array(self, array: AnyArray) -> int:
        return self.write(np.ascontiguousarray(array).data.cast("B")) if array.size else 0

    def saved(self) -> SavedFile:
        return SavedFile(self._bytes, self._digest.hexdigest())


def _header(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """The head of a safetensors file whose tensors follow in this order.

    Written here because the library can only write tensors that are all in memory.
    """
    described, start = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = {"I64": 8, "F32": 4}[dtype]
        for n in shape:
            size *= n
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _target(path: Path) -> Path:
    """Where the model goes: a link stays, what it points to is replaced."""
    try:
        target = path.resolve()
        is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
        if is_free:
            return target
        if (target / MANIFEST).is_file():
            if strangers := _strangers(target):
                raise ConfigError(
                    f"{path} holds a model, and {strangers[0]} besides; move that or save to another path"
                )
            return target
    except (OSError, RuntimeError) as exc:  # before Python 3.13 a loop of links is a RuntimeError
        raise ConfigError(f"cannot save a model to {path}: {exc}; give another path") from exc
    raise ConfigError(f"{path} is there and holds no model; remove it or save to another path")


def _strangers(path: Path) -> list[str]:
    """Files in a model's folder that no saving has written there."""
    ours = {MANIFEST, DENSE}
    found = [file.relative_to(path) for file in path.rglob("*") if not file.is_dir()]
    tables = {f for f in found if f.parent == Path(TABLES) and f.suffix == ".safetensors"}
    return sorted(str(f) for f in found if str(f) not in ours and f not in tables)


def _remove_remains(path: Path) -> None:
    """Remove what savings to the same path left behind whose process, on this machine, was ended in the middle."""
    for remains in path.parent.glob(f".{glob.escape(path.name)}.*"):
        found = re.fullmatch(r"\.(\d+)\.[0-9a-f]{8}(\.old)?", remains.name.removeprefix(f".{path.name}"))
        if found and not Path(f"/proc/{found[1]}").exists() and (path.is_dir() or not found[2]):
            shutil.rmtree(remains, ignore_errors=True)


def _put(temporary: Path, path: Path) -> None:
    """Rename the new model into place; an old one goes only after that."""
    old = None
    if path.exists():
        old = temporary.with_name(f"{temporary.name}.old")
        path.rename(old)
    temporary.rename(path)
    if old is not None:
        shutil.rmtree(old)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
