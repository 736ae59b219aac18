"""The files of a checkpoint as another number of pservers would have written them; restoring never needs it."""

from collections.abc import Iterator
from contextlib import suppress

import msgspec

from evergrad.checkpoint.catalogue import serials
from evergrad.checkpoint.files import write_piece
from evergrad.checkpoint.manifest import Manifest, write_manifest
from evergrad.checkpoint.pieces import PIECE_BYTES, Piece
from evergrad.checkpoint.reader import dense, rows
from evergrad.checkpoint.retention import remove
from evergrad.checkpoint.storage import Storage
from evergrad.errors import ConfigError, StorageError
from evergrad.messages import FileInfo, Place
from evergrad.placement import slots_owned, span_owned


def reshard(storage: Storage, manifest: Manifest, target: Storage, places: int) -> Manifest:
    """Write a checkpoint to `target` under the same serial, with the files of so many pservers; returns its manifest.

    Raises:
        ConfigError: there is one of that serial already.
        CheckpointError: the checkpoint is not as it was written; nothing is left behind.
    Memory: two files and a piece.
    """
    if manifest.serial in serials(target):
        raise ConfigError(f"{target.url} holds a checkpoint {manifest.serial} already; give another place")
    files: list[FileInfo] = []
    try:
        for place in range(places):
            for piece in _pieces(storage, manifest, place, places):
                files += write_piece(target, manifest.serial, manifest.schema, Place(place), piece)
        made = msgspec.structs.replace(manifest, places=places, files=tuple(sorted(files, key=lambda f: f.path)))
        write_manifest(target, made)
    except BaseException:
        with suppress(StorageError):
            remove(target, manifest.serial)
        raise
    return made


def _pieces(storage: Storage, manifest: Manifest, place: int, places: int) -> Iterator[Piece]:
    """A place's pieces, none of them much larger than a file."""
    for spec in manifest.schema.tables:
        yield from rows(storage, manifest, spec.name, slots_owned(place, places))
    for number, group in enumerate(manifest.schema.groups):
        span = span_owned(group.size, place, places)
        width = 1 + (group.rule.state_width if group.rule is not None else 0)
        step = max(PIECE_BYTES // (8 * width), 1)
        for start in range(span.start, span.stop, step):
            yield dense(storage, manifest, number, range(start, min(start + step, span.stop)))
