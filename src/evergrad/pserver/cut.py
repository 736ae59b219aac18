"""A cut of a table: all of it as it was at one moment, handed out piece by piece while training goes on."""

import numpy as np

from evergrad.checkpoint.pieces import Notes, RowsPiece
from evergrad.errors import InvariantError
from evergrad.kernels import cut, index
from evergrad.kernels.arrays import Integers, Rows
from evergrad.kernels.aside import FROM, TOP, Aside, words_needed
from evergrad.messages import Floats, Keys
from evergrad.pserver.arena import Pages

RELEASE_BYTES = 16 << 20
"""So much memory is given back at once."""


class TableCut:
    """One table at the moment at which this is made.

    Making it takes the same time for any number of rows. While it is under way, the table has everything that belongs
    to it copied aside before it changes (`kernels/aside.py`); that takes the bytes of the row and 24 beside it, and a
    bit for each row of the table.

    Args:
        number: the table's, for its pieces.
        at: the table's index.
        stride: floats of a row.
        has_notes: whether the table keeps notes of its rows.
        updates: how often it was updated.

    Raises:
        MemoryError: the system refuses the address space for it.
    """

    def __init__(self, number: int, at: index.Index, stride: int, has_notes: bool, updates: int) -> None:
        self._number, self._stride, self._has_notes = number, stride, has_notes
        self._first_slot = at.first_slot
        self._rows_of, self._candidates_of = at.counts.copy(), at.used - at.counts
        row_bytes = 8 + 4 * stride + (8 if has_notes else 0)
        self._ends_bytes = np.cumsum(self._rows_of * row_bytes + self._candidates_of * 16)
        self._most = int(at.used.max(initial=0))
        limit = int(at.pool[index.ROWS])
        self._seen = Pages(limit // 8 + 1)
        self._kept = Pages(8 * words_needed(self._rows_of, self._candidates_of, stride, has_notes))
        self._state = np.array([0, limit, updates, stride, 0], np.int64)
        self._aside = Aside(
            self._state,
            self._seen.array(np.uint8),
            np.full(at.counts.size, -1, np.int64),
            self._kept.array(np.int64),
            self._kept.array(np.float32),
            np.empty(0, np.float32),
            np.empty(0, np.int32),
        )
        self._scratch = np.empty(0, np.int64)
        self._piece: RowsPiece | None = None
        self._rows = self._candidates = 0

    def scratch(self, size: int) -> Integers:
        """Room for so many numbers, to be used at once: memory taken anew each time would cost more than its use."""
        if self._scratch.size < size:
            self._scratch = np.empty(2 * size, np.int64)
        return self._scratch[:size]

    @property
    def is_handed_out(self) -> bool:
        """Whether no slot is left."""
        return int(self._state[FROM]) == self._rows_of.size

    @property
    def kept_bytes(self) -> int:
        """How much was copied aside."""
        return 8 * int(self._state[TOP])

    def aside(self, rows: Floats, notes: Notes) -> Aside:
        """What kernels need of it; `rows` and `notes` are the table's arenas as they are now."""
        return self._aside._replace(rows=rows, notes=notes if self._has_notes else self._aside.notes)

    def advance(self, at: index.Index, aside: Aside, piece_bytes: int, slice_bytes: int) -> RowsPiece | None:
        """Copy about `slice_bytes` more; returns a piece of about `piece_bytes` when one is complete.

        A slot is never divided between pieces or slices. A table without rows is one piece.
        """
        piece = self._piece or self._begin_piece(piece_bytes)
        begin, stop = int(self._state[FROM]), piece.slots.stop - self._first_slot
        end = min(self._end_of(begin, slice_bytes), stop)
        self._copy_rows(at, aside, begin, end, piece)
        self._copy_candidates(at, aside, begin, end, piece)
        self._state[FROM] = end
        self._piece = piece if end < stop else None
        return piece if end == stop else None

    def release(self) -> bool:
        """Give back some of the memory, when nobody needs the cut any more; returns whether there is more."""
        return self._kept.release(self.kept_bytes, RELEASE_BYTES)

    def _begin_piece(self, piece_bytes: int) -> RowsPiece:
        begin = int(self._state[FROM])
        end = self._end_of(begin, piece_bytes)
        rows, candidates = int(self._rows_of[begin:end].sum()), int(self._candidates_of[begin:end].sum())
        self._rows = self._candidates = 0
        return RowsPiece(
            self._number,
            range(self._first_slot + begin, self._first_slot + end),
            np.empty(rows, np.int64),
            np.empty((rows, self._stride), np.float32),
            np.empty((rows, 2), np.int32) if self._has_notes else None,
            np.empty(candidates, np.int64),
            np.empty((candidates, 2), np.int32),
        )

    def _copy_rows(self, at: index.Index, aside: Aside, begin: int, end: int, piece: RowsPiece) -> None:
        keys, whats = self._listed(at, aside, begin, end, is_candidate=False)
        here = slice(self._rows, self._rows + keys.size)
        piece.keys[here] = keys
        notes = self._aside.notes if piece.notes is None else piece.notes[here].reshape(-1)
        cut.copy_rows(aside, whats, piece.rows[here].reshape(-1), notes)
        self._rows = here.stop

    def _copy_candidates(self, at: index.Index, aside: Aside, begin: int, end: int, piece: RowsPiece) -> None:
        keys, whats = self._listed(at, aside, begin, end, is_candidate=True)
        here = slice(self._candidates, self._candidates + keys.size)
        piece.candidates[here] = keys
        cut.copy_notes(whats, piece.candidate_notes[here].reshape(-1))
        self._candidates = here.stop

    def _listed(self, at: index.Index, aside: Aside, begin: int, end: int, *, is_candidate: bool) -> tuple[Keys, Rows]:
        counts = self._candidates_of if is_candidate else self._rows_of
        count = int(counts[begin:end].sum())
        room = cut.room_for(count, self._most)
        found = cut.list_entries(at, aside, begin, end, is_candidate, room) if count else 0
        if found != count:
            raise InvariantError(f"a cut had {count} entries in slots from {begin} to {end}, and now {found} are found")
        return room.keys[:count], room.whats[:count]

    def _end_of(self, begin: int, limit_bytes: int) -> int:
        """The end of the slots from `begin` on that take so many bytes, one slot at least."""
        before = int(self._ends_bytes[begin - 1]) if begin else 0
        return max(int(np.searchsorted(self._ends_bytes, before + limit_bytes, side="right")), begin + 1)
