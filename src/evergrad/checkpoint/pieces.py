"""Parts of a model as a checkpoint holds them: what a pserver hands out to be written, and takes to restore."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.messages import AnyArray, Floats, Keys

Notes = NDArray[np.int32]

PIECE_BYTES = 8 << 20
"""About how large a piece is at most: what a writer holds at a time, what is sent again when a put fails, and what a
pserver reads too much at either end of its slots. A pserver holds one being put together, one being written, and the
latter once more as the file has it."""


class RowsPiece(NamedTuple):
    """All of a table in a range of slots at the moment of the cut, sorted by (slot, key)."""

    table: int
    """Its number in the schema."""
    slots: range
    keys: Keys
    """Shape (n,)."""
    rows: Floats
    """Shape (n, width), each `[value | state]`, of the width that `RuleSpec.row_width` says."""
    notes: Notes | None
    """Shape (n, 2): the update a row was last met in and in how many; None where the table's policy keeps none."""
    candidates: Keys
    """Shape (c,): keys met that have no row yet."""
    candidate_notes: Notes
    """Shape (c, 2), as `notes`."""


class DensePiece(NamedTuple):
    """A span of a dense group at the moment of the cut; a place's part may be handed out in several."""

    group: int
    """Its number in the schema."""
    span: range
    """Elements of the group's flat array."""
    values: AnyArray
    """Shape (n,), float32 or int64."""
    state: Floats
    """Shape (state width, n)."""
    updates: tuple[int, ...]
    """Of each parameter of the group, how often it was updated; of one without elements in the span it may be 0."""


Piece = RowsPiece | DensePiece
