"""A saved model: a folder that holds what inference needs and nothing else.

    MODEL/
      dense.safetensors            parameters and buffers, by their names in the torch model
      tables/NAME.safetensors      `keys` int64 (n,) and `values` float32 (n, dim), sorted by (slot, key)
      manifest.json                the tables, how to answer keys without a row, and each file's size and checksum

The manifest is written last. On this machine the folder appears under its name as a whole, or not at all; where there
are but objects there is no model before its manifest. The bytes depend on the model alone: not on the number of
pservers, the time or the machine.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from safetensors import SafetensorError
from safetensors.numpy import load_file

from evergrad.checkpoint.output import Kind, Output, Writable, new_folder
from evergrad.checkpoint.storage import Buffer
from evergrad.checkpoint.tensors import TYPES, bytes_of, header
from evergrad.errors import CheckpointError
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


class DenseTensor(NamedTuple):
    """A parameter or buffer as it is in the torch model: torch's name of its type, its shape, its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Buffer


class ModelWriter:
    """Writes one model into a folder that nobody else takes for one yet."""

    def __init__(self, output: Output, seed: int) -> None:
        self._output, self._seed = output, seed
        self._tables: dict[str, SavedTable] = {}
        self._files: dict[str, SavedFile] = {}

    def dense(self, tensors: Sequence[DenseTensor]) -> None:
        """Write the parameters and buffers, widest types first, then by name."""
        ordered = sorted(tensors, key=lambda t: (-TYPES[t.dtype].bytes, t.name))
        with self._file(DENSE) as file:
            file.write(header({t.name: (TYPES[t.dtype], t.shape) for t in ordered}))
            for tensor in ordered:
                file.write(tensor.data)

    def table(self, spec: TableSpec, rows: int, keys: Iterable[Keys], values: Iterable[Floats]) -> None:
        """Write a table piece by piece, first all keys, then all values.

        Raises:
            CheckpointError: there were more or fewer than `rows` rows.
        """
        name = f"{TABLES}/{quote(spec.name, safe='')}.safetensors"
        with self._file(name) as file:
            file.write(header({"keys": (TYPES["int64"], (rows,)), "values": (TYPES["float32"], (rows, spec.dim))}))
            for what, pieces, row_bytes in (("keys", keys, 8), ("values", values, 4 * spec.dim)):
                written = sum(file.write(bytes_of(piece)) for piece in pieces)
                if written != rows * row_bytes:
                    raise CheckpointError(f"table {spec.name!r}: {written} bytes of {what} for {rows} rows; save again")
        self._tables[spec.name] = SavedTable(name, spec.dim, rows, self._seed, spec.initializer, spec.unseen_zero)

    def manifest(self) -> None:
        """Write the manifest: now the model is complete."""
        manifest = Manifest(FORMAT, self._tables, dict(sorted(self._files.items())))
        with self._output.writer(MANIFEST) as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")

    @contextmanager
    def _file(self, name: str) -> Iterator["_HashedFile"]:
        with self._output.writer(name) as file:
            hashed = _HashedFile(file)
            yield hashed
        self._files[name] = hashed.saved()


@contextmanager
def new_model(target: str | os.PathLike[str], seed: int) -> Iterator[ModelWriter]:
    """A writer for a model that appears at `target` when the block ends well, instead of a model that is there.

    Raises:
        ConfigError: something that is no model is at `target`, or it cannot be written; nothing there was changed.
        StorageError: the URL cannot be written.
    """
    with new_folder(target, MODEL) as output:
        writer = ModelWriter(output, seed)
        yield writer
        writer.manifest()


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
    def __init__(self, file: Writable) -> None:
        self._file, self._digest, self._bytes = file, hashlib.blake2b(digest_size=16), 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._digest.update(view)
        self._bytes += view.nbytes
        return view.nbytes

    def saved(self) -> SavedFile:
        return SavedFile(self._bytes, self._digest.hexdigest())


def _is_of_a_model(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return name in (MANIFEST, DENSE) or (folder == TABLES and file.endswith(".safetensors"))


MODEL = Kind("model", MANIFEST, _is_of_a_model)
