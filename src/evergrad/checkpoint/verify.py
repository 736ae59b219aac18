"""Reading a whole checkpoint to see that it is as it was written."""

from typing import NamedTuple

from evergrad.checkpoint.catalogue import good
from evergrad.checkpoint.pieces import RowsPiece
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.storage import Storage


class Verified(NamedTuple):
    """What was read: rows of each table, elements of dense groups, files and their bytes."""

    rows: dict[str, int]
    elements: int
    files: int
    bytes: int


def verify(storage: Storage, serial: int) -> Verified:
    """Read every file of a checkpoint and check all that restoring it would.

    Raises:
        CheckpointError: something is missing or not as it was written; says what.
    """
    manifest = good(storage, serial)
    rows = {spec.name: 0 for spec in manifest.schema.tables}
    elements = 0
    for piece in pieces(storage, manifest, 0, 1):
        if isinstance(piece, RowsPiece):
            rows[manifest.schema.tables[piece.table].name] += piece.keys.size
        else:
            elements += piece.values.size
    return Verified(rows, elements, len(manifest.files), manifest.bytes)
