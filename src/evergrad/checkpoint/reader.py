"""Reading a checkpoint for any number of pservers: only files that overlap, two in memory at a time."""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from evergrad.checkpoint.dense import Span
from evergrad.checkpoint.files import read_file
from evergrad.checkpoint.layout import folder_of
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.pieces import DensePiece, Piece, RowsPiece
from evergrad.checkpoint.rows import rows_piece
from evergrad.checkpoint.storage import Storage
from evergrad.checkpoint.tensors import Tensors
from evergrad.errors import CheckpointError
from evergrad.messages import FileInfo, FileKind
from evergrad.placement import SLOTS, slots_owned, span_owned

VALUES_AND_STATE = (FileKind.DENSE, FileKind.OPTIMIZER)


def overlapping(manifest: Manifest, place: int, places: int) -> list[FileInfo]:
    """The files that pserver `place` of `places` has to read, in the order in which `pieces` does."""
    slots = slots_owned(place, places)
    files = [f for spec in manifest.schema.tables for f in _of_rows(manifest, spec.name, slots)]
    for number, group in enumerate(manifest.schema.groups):
        files += _of_span(manifest, number, span_owned(group.size, place, places))
    return files


def pieces(storage: Storage, manifest: Manifest, place: int, places: int) -> Iterator[Piece]:
    """What pserver `place` of `places` holds: rows of each table by slot, then its span of each dense group.

    Rows come in one piece for each file that overlaps its slots; a group in one piece of exactly its span, also an
    empty one. Arrays are the caller's. Sizes, checksums, shapes, counts and the order of keys are checked.

    Raises:
        CheckpointError: a file is not as it was written.
        StorageError: a file cannot be read.
    Memory: two files, the piece, and the spans of dense groups. The next file is read while a piece is used.
    """
    slots, schema = slots_owned(place, places), manifest.schema
    for spec in schema.tables:
        yield from rows(storage, manifest, spec.name, slots)
    for number, group in enumerate(schema.groups):
        yield dense(storage, manifest, number, span_owned(group.size, place, places))


def rows(storage: Storage, manifest: Manifest, table: str, slots: range = range(SLOTS)) -> Iterator[RowsPiece]:
    """A table's rows in these slots, sorted by (slot, key), in one piece for each file; otherwise as `pieces`."""
    for info, tensors in _read_ahead(storage, manifest.serial, _of_rows(manifest, table, slots)):
        try:
            piece = rows_piece(manifest.schema, info, tensors, slots)
        except CheckpointError as exc:
            raise _named(storage, manifest, info, exc) from exc
        yield piece


def dense(
    storage: Storage, manifest: Manifest, group: int, span: range, kinds: Sequence[FileKind] = VALUES_AND_STATE
) -> DensePiece:
    """These elements of a dense group, put together of the files that hold some of them; otherwise as `pieces`.

    Args:
        storage: where the checkpoint is.
        manifest: the checkpoint.
        group: the group's number in the schema.
        span: which elements.
        kinds: what to read; what is left out is zero.
    """
    whole = Span(group, manifest.schema.groups[group], span, is_exact=manifest.schema.update.is_sync)
    files = _of_span(manifest, group, span, kinds)
    for info, tensors in _read_ahead(storage, manifest.serial, files):
        try:
            whole.take(info, tensors)
        except CheckpointError as exc:
            raise _named(storage, manifest, info, exc) from exc
    return whole.piece()


def _read_ahead(
    storage: Storage, serial: int, files: Sequence[FileInfo]
) -> Generator[tuple[FileInfo, Tensors], None, None]:
    """Each file's tensors, which the next step makes void, while the one after it is read."""
    if not files:
        return
    size = max(file.bytes for file in files)
    buffers = [np.empty(size, np.uint8).data for _ in files[:2]]
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-reader") as thread:
        reading = thread.submit(read_file, storage, serial, files[0], buffers[0])
        for number, file in enumerate(files):
            tensors = reading.result()
            if number + 1 < len(files):
                buffer = buffers[(number + 1) % 2]
                reading = thread.submit(read_file, storage, serial, files[number + 1], buffer)
            yield file, tensors


def _of_rows(manifest: Manifest, table: str, slots: range) -> list[FileInfo]:
    return [f for f in manifest.of_table(table) if f.slots and _overlap(f.slots, slots)]


def _of_span(
    manifest: Manifest, group: int, span: range, kinds: Sequence[FileKind] = VALUES_AND_STATE
) -> list[FileInfo]:
    files = [f for kind in kinds for f in manifest.of_group(group, kind)]
    return [f for f in files if f.span and _overlap(f.span, span)]


def _overlap(held: tuple[int, int], wanted: range) -> bool:
    return max(held[0], wanted.start) < min(held[1], wanted.stop)


def _named(storage: Storage, manifest: Manifest, info: FileInfo, exc: CheckpointError) -> CheckpointError:
    return CheckpointError(
        f"{storage.where(f'{folder_of(manifest.serial)}/{info.path}')} {exc}; use another checkpoint"
    )
