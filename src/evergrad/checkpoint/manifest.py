"""The manifest: the file that makes a checkpoint exist, and all that is known of it."""

import zlib
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from evergrad.checkpoint.layout import EPOCH_ID, MANIFEST, METRICS, STEP_ID, folder_of, is_data
from evergrad.checkpoint.storage import Storage
from evergrad.errors import CheckpointError, StorageError
from evergrad.messages import EvaluationDone, FileInfo, FileKind, GroupKind, Progress, SavingDone, Schema, documents
from evergrad.placement import SLOTS
from evergrad.version import VERSION

FORMAT = "evergrad-checkpoint-1"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds."""

    format: str = FORMAT
    evergrad: str = VERSION
    """The version that wrote it."""
    job: str
    lineage: str
    """The job that began this training: a run that goes on from a checkpoint, and all that follow it, have the same."""
    serial: int
    created: str
    """ISO 8601, UTC."""
    places: int
    """On how many pservers it was made."""
    generation: int
    schema: Schema
    progress: Progress
    updates: dict[str, int]
    """How often each table was updated."""
    files: tuple[FileInfo, ...]
    evaluations: tuple[EvaluationDone, ...] = ()
    """Those done before it, which a script that goes on from here may ask for again."""
    savings: tuple[SavingDone, ...] = ()
    """Models saved before it; they are not saved again."""
    metrics: dict[int, dict[str, float]] = {}
    """What the script had reported so far, by epoch; what it has reported since is in `metrics.json`."""
    best: float | None = None
    """What `best=` made of the metrics of the epoch that ends with it; less is better. It comes from `metrics.json`."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.bytes for file in self.files)

    def rows(self, table: str) -> int:
        """How many rows a table has."""
        return sum(file.rows for file in self.of_table(table))

    def of_table(self, table: str) -> list[FileInfo]:
        """A table's files in the order of slots."""
        files = (f for f in self.files if f.kind is FileKind.ROWS and f.table == table)
        return sorted(files, key=lambda f: f.slots or (0, 0))

    def of_group(self, group: int, kind: FileKind) -> list[FileInfo]:
        """The files of a dense group's values or state in the order of elements."""
        files = (f for f in self.files if f.kind is kind and f.group == group)
        return sorted(files, key=lambda f: f.span or (0, 0))


class Metrics(msgspec.Struct, frozen=True):
    """What the script has reported of a checkpoint, which is known only when it exists."""

    metrics: dict[int, dict[str, float]]
    best: float | None


def now() -> str:
    """The time as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_manifest(storage: Storage, manifest: Manifest) -> None:
    """Make a checkpoint exist, all of whose files are there.

    Raises:
        CheckpointError: there is another one of that serial.
        StorageError: it cannot be written. The same call may be made again.
    """
    folder = folder_of(manifest.serial)
    storage.put(f"{folder}/{EPOCH_ID}", [f"{manifest.progress.epoch}\n".encode()])
    storage.put(f"{folder}/{STEP_ID}", [f"{manifest.progress.version}\n".encode()])
    path = f"{folder}/{MANIFEST}"
    if not storage.put_new(path, encode(manifest)):
        raise CheckpointError(f"{storage.where(path)} is there already: two jobs write to one place; give each its own")


def read_manifest(storage: Storage, serial: int) -> Manifest:
    """A checkpoint's manifest, checked in itself.

    Raises:
        CheckpointError: there is none, or it cannot be that of a checkpoint; says why.
    """
    path = f"{folder_of(serial)}/{MANIFEST}"
    where = storage.where(path)
    try:
        data = storage.read(path)
    except StorageError as exc:
        if exc.is_missing:
            raise CheckpointError(f"{storage.where(folder_of(serial))} is no checkpoint: it has no {MANIFEST}") from exc
        raise
    try:
        found = msgspec.json.decode(data, type=_Frame)
        if found.format != FORMAT:
            raise CheckpointError(f"{where} is of format {found.format!r}; this version reads {FORMAT!r}")
        if found.manifest_crc32 != checksum([memoryview(data.rpartition(_CRC32)[0])]):
            raise CheckpointError(f"{where} has changed since it was written; use another checkpoint")
        manifest = documents.decode(data, Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"{where} cannot be read: {exc}") from exc
    wrong = f"it is that of checkpoint {manifest.serial}" if manifest.serial != serial else check(manifest)
    if wrong is not None:
        raise CheckpointError(f"{where} cannot be right: {wrong}; use another checkpoint")
    return manifest


def write_metrics(storage: Storage, serial: int, metrics: Metrics) -> None:
    """Put what is known of a checkpoint beside its manifest.

    Raises:
        StorageError: it cannot be written.
    """
    storage.put(f"{folder_of(serial)}/{METRICS}", [msgspec.json.format(documents.encode(metrics)) + b"\n"])


def with_metrics(storage: Storage, manifest: Manifest) -> Manifest:
    """The manifest with what is beside it in `metrics.json`; without where that cannot be read."""
    try:
        found = documents.decode(storage.read(f"{folder_of(manifest.serial)}/{METRICS}"), Metrics)
    except (msgspec.MsgspecError, StorageError):
        return manifest
    return msgspec.structs.replace(manifest, metrics=found.metrics, best=found.best)


def check(manifest: Manifest) -> str | None:
    """What is wrong with a manifest: files that cannot be its own, or do not cover the model; None if nothing is."""
    schema = manifest.schema
    names = {spec.name for spec in schema.tables}
    for file in manifest.files:
        if not is_data(file.path):
            return f"{file.path!r} is no file of a checkpoint"
        is_rows = file.kind is FileKind.ROWS
        if is_rows and (file.table not in names or file.slots is None):
            return f"{file.path} belongs to no table of the model"
        if not is_rows and (file.group is None or file.group >= len(schema.groups) or file.span is None):
            return f"{file.path} belongs to no parameters of the model"
    if manifest.updates.keys() != names:
        return "the counts of updates are of other tables than the model's"
    for spec in schema.tables:
        ranges = [file.slots or (0, 0) for file in manifest.of_table(spec.name)]
        if wrong := _uncovered(ranges, SLOTS):
            return f"table {spec.name!r}: slots {wrong}"
    for number, group in enumerate(schema.groups):
        kinds = [FileKind.DENSE, FileKind.OPTIMIZER] if group.kind is GroupKind.TRAINED else [FileKind.DENSE]
        for kind in kinds:
            if wrong := _uncovered([file.span or (0, 0) for file in manifest.of_group(number, kind)], group.size):
                return f"{kind} of parameter group {number}: elements {wrong}"
    return None


class _Frame(msgspec.Struct):
    format: str
    manifest_crc32: str = ""


_CRC32 = b'"manifest_crc32"'


def checksum(parts: Iterable[memoryview]) -> str:
    """The CRC-32 of what these parts are together, in hexadecimal."""
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return f"{total:08x}"


def encode(manifest: Manifest) -> bytes:
    """A manifest as its file has it: JSON whose last member is the CRC-32 of all bytes before that member."""
    text = msgspec.json.format(documents.encode(manifest)).removesuffix(b"\n}") + b",\n  "
    return text + _CRC32 + f': "{checksum([memoryview(text)])}"\n}}\n'.encode()


def _uncovered(ranges: Iterable[tuple[int, int]], size: int) -> str | None:
    """Which numbers below `size` these ranges, sorted, do not cover, or cover twice; None if each is covered once."""
    reached = 0
    for start, stop in ranges:
        if start > reached:
            return f"{reached} to {start - 1} are missing"
        if start < reached or stop <= start:
            return f"{start} to {stop - 1} overlap others"
        reached = stop
    if reached != size:
        return f"{reached} to {size - 1} are missing" if reached < size else f"end at {reached - 1}, not {size - 1}"
    return None
