"""A file of a table's rows: its tensors, and the piece that is made of them again."""

import numpy as np

from evergrad.checkpoint.pieces import Notes, RowsPiece
from evergrad.checkpoint.states import row_parts
from evergrad.checkpoint.tensors import Tensors, check
from evergrad.errors import CheckpointError
from evergrad.kernels.hashing import slots_of
from evergrad.messages import FileInfo, Floats, Keys, Schema, TableSpec

KEYS, NOTES, CANDIDATES, CANDIDATE_NOTES = "keys", "notes", "candidates", "candidate_notes"


def rows_tensors(spec: TableSpec, piece: RowsPiece) -> Tensors:
    """What a file holds of these rows: keys, the parts of rows by name, notes where there are any, and candidates."""
    n = piece.keys.size
    tensors: Tensors = {KEYS: piece.keys}
    for part in row_parts(spec.rule, spec.dim):
        tensors[part.name] = piece.rows[:, part.start : part.start + part.width].reshape(part.shape(n))
    if piece.notes is not None:
        tensors[NOTES] = piece.notes
    return {**tensors, CANDIDATES: piece.candidates, CANDIDATE_NOTES: piece.candidate_notes.reshape(-1, 2)}


def rows_piece(schema: Schema, info: FileInfo, tensors: Tensors, wanted: range) -> RowsPiece:
    """The rows of a file that fall in the wanted slots, as arrays of their own.

    Raises:
        CheckpointError: the tensors are not those of such a file; the sentence goes on from its name.
    """
    number, spec = next((n, t) for n, t in enumerate(schema.tables) if t.name == info.table)
    parts, n, c = row_parts(spec.rule, spec.dim), info.rows, info.candidates
    shapes: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
        KEYS: (np.int64, (n,)), **{part.name: (np.float32, part.shape(n)) for part in parts},
        CANDIDATES: (np.int64, (c,)), CANDIDATE_NOTES: (np.int32, (c, 2)),
    }  # fmt: skip
    if NOTES in tensors:
        shapes[NOTES] = (np.int32, (n, 2))
    check(tensors, shapes)
    assert info.slots is not None  # of a file of rows: `manifest.check`
    slots, keys = range(*info.slots), tensors[KEYS]
    of_rows, of_candidates = slots_of(keys), slots_of(tensors[CANDIDATES])
    if not (_are_in(of_rows, slots) and _are_in(of_candidates, slots)):
        raise CheckpointError(f"has keys outside the slots {slots.start} to {slots.stop - 1}")
    if not _are_sorted(of_rows, keys):
        raise CheckpointError("has keys that are not sorted by (slot, key), or one of them twice")
    inside = range(max(slots.start, wanted.start), min(slots.stop, wanted.stop))
    begin, end = (int(at) for at in np.searchsorted(of_rows, (inside.start, inside.stop)))
    rows: Floats = np.empty((end - begin, parts[-1].start + parts[-1].width), np.float32)
    for part in parts:
        rows[:, part.start : part.start + part.width] = tensors[part.name][begin:end].reshape(-1, part.width)
    is_inside = (of_candidates >= inside.start) & (of_candidates < inside.stop)
    notes: Notes | None = tensors[NOTES][begin:end].copy() if NOTES in tensors else None
    return RowsPiece(
        number, inside, keys[begin:end].copy(), rows, notes,
        tensors[CANDIDATES][is_inside], tensors[CANDIDATE_NOTES][is_inside],
    )  # fmt: skip


def _are_in(slots: np.ndarray[tuple[int], np.dtype[np.int32]], owned: range) -> bool:
    return slots.size == 0 or bool(slots.min() >= owned.start and slots.max() < owned.stop)


def _are_sorted(slots: np.ndarray[tuple[int], np.dtype[np.int32]], keys: Keys) -> bool:
    following, before = slots[1:], slots[:-1]
    return bool(np.all((following > before) | ((following == before) & (keys[1:] > keys[:-1]))))
