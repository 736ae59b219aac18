"""One embedding table's rows on one pserver."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evergrad.checkpoint.pieces import Notes, RowsPiece
from evergrad.errors import CheckpointError, InvariantError
from evergrad.kernels import aside, cut, gather, index, policy, rules
from evergrad.kernels.arrays import Integers, Rows
from evergrad.kernels.hashing import slots_of, unique
from evergrad.kernels.initial import first_values, scratch_for, table_seed, zeros_of
from evergrad.kernels.merge import RowPart, has_duplicates, mean_rows
from evergrad.messages import AnyArray, ExportPart, Floats, Keys, TableSpec
from evergrad.placement import SLOTS
from evergrad.pserver.arena import Arena
from evergrad.pserver.cut import TableCut
from evergrad.pserver.policy import policy_of
from evergrad.pserver.rules import apply_rows


class MemoryUse(NamedTuple):
    """Bytes of memory a table has touched, to the byte but for the rest of a page at the end of each array."""

    rows: int
    """Values and optimizer state, of deleted rows not made anew yet too."""
    beyond: int
    """Index, notes and numbers of deleted rows."""


_NO_ENTRIES = np.empty(0, np.int64)
_NO_CLASSES = np.empty(0, np.uint8)
_NO_NOTES = np.empty(0, np.int32)
_NO_ASIDE = aside.no_aside()


class Table:
    """The rows of the owned slots of one table.

    Invariants:
        1. Row r is `[value | state]` at `r * stride` of the arena, and its note at `2 * r` of the notes where the
           policy has them. Numbers of deleted rows are given to the next rows made.
        2. Which rows there are, their values and the export depend on seed, table and updates only: not on the owned
           slots, on row numbers, nor on pulls.
    """

    def __init__(self, spec: TableSpec, seed: int, slots: range) -> None:
        self._spec = spec
        self._slots = slots
        number = table_seed(seed, spec.name)
        self._first, self._zeros = first_values(spec.initializer, spec.dim, number), zeros_of(number)
        self._scratch = scratch_for(spec.dim)
        self._stride = spec.rule.row_width(spec.dim)
        self._policy = policy_of(spec)
        self._updates = 0
        self._cut: TableCut | None = None
        self._rows: Arena[np.float32] = Arena(np.float32)
        self._entries: Arena[np.int64] = Arena(np.int64)
        self._free_class: Arena[np.uint8] = Arena(np.uint8)
        self._free_rows: Arena[np.int64] = Arena(np.int64)
        self._notes: Arena[np.int32] = Arena(np.int32)
        self._index = index.empty_index(slots)

    def __len__(self) -> int:
        return int(self._index.pool[index.ROWS] - self._index.pool[index.FREE])

    @property
    def updates(self) -> int:
        """How often it was updated."""
        return self._updates

    def pull(self, keys: Keys, evaluating: bool, out: Floats | None = None) -> Floats:
        """Copy the rows of `keys`; changes nothing.

        Args:
            keys: shape (n,); duplicates allowed; all owned by this pserver.
            evaluating: a key without a row yields zeros if the table says so, and its initial value otherwise.
            out: where to, shape (n, dim); a fresh array if not given.

        Returns:
            Shape (n, dim), row i for `keys[i]`.
        Cost: n probes, n * dim * 4 bytes copied.
        """
        rows = index.find(self._index, keys)
        if out is None:
            out = np.empty((keys.size, self._spec.dim), np.float32)
        if gather.copy_rows(self._rows.array, self._stride, rows, out):
            first = self._zeros if evaluating and self._spec.unseen_zero else self._first
            gather.fill_missing(rows, keys, first, self._scratch, out)
        return out

    def memory(self) -> MemoryUse:
        """What the table takes."""
        at = self._index
        made, free = int(at.pool[index.ROWS]), int(at.pool[index.FREE])
        entries = int(at.pool[index.TOP])
        directory = at.regions.nbytes + at.counts.nbytes + at.used.nbytes + at.pool.nbytes
        notes = 8 * made if self._policy.has_notes else 0
        beyond = 16 * entries + entries // index.UNIT + directory + notes + 8 * free
        return MemoryUse(4 * self._stride * made, beyond)

    def update(self, parts: Sequence[RowPart], total: int, lr: float) -> None:
        """Decide which rows there are, make those that are new and apply the rule once to each, with its mean gradient.

        A key's gradient is the sum of samples * gradient over the parts, taken in order in float64, divided by `total`
        and rounded once; for one part of `total` samples that is its gradient itself. A key that stands twice in a
        part has its gradients summed. One call is one update of the table and one step of its policy, also without
        keys.

        Args:
            parts: in task order; keys all owned by this pserver.
            total: samples of the whole step, those of tasks without keys here too.
            lr: the step's learning rate.

        Cost: n probes, n rows read and written; several parts take dim * 8 bytes of scratch for
            each key that stands in more than one. With a policy also
            what `pserver/policy.py` says.
        """
        self._updates += 1
        if not self._policy.is_none:
            self._update_by_policy(parts, total, lr)
            return
        if len(parts) == 1 and parts[0][2] == total:
            keys, grads, _ = parts[0]
            rows = self._rows_of(keys)
            self._keep(keys, rows)
            if not has_duplicates(rows):
                apply_rows(self._spec.rule, self._rows.array, rows, grads, lr, self._updates)
                return
        keys, grads = mean_rows(parts, total, self._spec.dim)
        rows = self._rows_of(keys)
        self._keep(keys, rows)
        apply_rows(self._spec.rule, self._rows.array, rows, grads, lr, self._updates)

    def evict(self, keys: Keys) -> int:
        """Delete the rows of those keys that have one, and forget those that are candidates; returns how many rows.

        Args:
            keys: shape (n,); duplicates and keys of other pservers are allowed.
        """
        before = len(self)
        self._make_room_for_free_rows()
        index.delete(self._index, self._aside(), keys)
        return before - len(self)

    def export(self, part: ExportPart, slot: int, limit: int) -> tuple[AnyArray, int | None]:
        """Keys, or values without state, sorted by (slot, key), of whole slots from `slot` on.

        Args:
            part: keys or values.
            slot: an owned slot; the first call passes the first owned slot.
            limit: about how many bytes to return; a slot is never cut.

        Returns:
            Shape (n,) or (n, dim), and the slot to go on with, None at the end.
        """
        begin = slot - self._slots.start
        width = 8 if part is ExportPart.KEYS else 4 * self._spec.dim
        sizes = np.cumsum(self._index.counts[begin:]) * width
        end = begin + min(max(int(np.searchsorted(sizes, limit, side="right")), 1), max(sizes.size, 0))
        keys, rows = self._sorted_entries(begin, end)
        following = self._slots.start + end if end < len(self._slots) else None
        if part is ExportPart.KEYS:
            return keys, following
        out = np.empty((rows.size, self._spec.dim), np.float32)
        gather.copy_rows(self._rows.array, self._stride, rows, out)
        return out, following

    def begin_cut(self, number: int) -> bool:
        """Show the table as it is now in pieces of table `number`, while it goes on; one cut at a time.

        Returns:
            Whether there is anything to show, slots without rows included.

        Raises:
            MemoryError: the system refuses what that takes; see `TableCut`.
        """
        if self._slots:
            self._cut = TableCut(number, self._index, self._stride, self._policy.has_notes, self._updates)
        return bool(self._slots)

    def advance_cut(self, piece_bytes: int, slice_bytes: int) -> tuple[RowsPiece | None, bool]:
        """Copy about `slice_bytes` of the cut; returns a piece when one is complete, and whether that was the last."""
        assert self._cut is not None  # as was begun
        piece = self._cut.advance(self._index, self._aside(), piece_bytes, slice_bytes)
        return piece, self._cut.is_handed_out

    def end_cut(self) -> TableCut | None:
        """Keep nothing aside any more; returns the cut, whose memory is to be released."""
        ended, self._cut = self._cut, None
        return ended

    def set_updates(self, updates: int) -> None:
        """It was updated so often; then it is loaded."""
        self._updates = updates

    def load(self, piece: RowsPiece) -> None:
        """Take the rows and candidates of some slots.

        Raises:
            CheckpointError: they do not fit, or a key is here already.
        Cost: 60 ns a row of 32 floats, if the memory is at hand.
        """
        shape, has_notes = (piece.keys.size, self._stride), self._policy.has_notes
        if piece.rows.shape != shape or (piece.notes is not None) != has_notes:
            found = f"rows of shape {piece.rows.shape} {'with' if piece.notes is not None else 'without'} notes"
            raise self._not_fitting(f"{found} where {shape} {'with' if has_notes else 'without'} them belongs")
        rows, new = self._numbers_of(piece.keys)
        if new.size < rows.size:
            raise self._not_fitting("a key twice")
        if has_notes:
            self._notes.reserve(2 * int(self._index.pool[index.ROWS]))
        notes = _NO_NOTES if piece.notes is None else piece.notes.reshape(-1)
        cut.take_rows(self._rows.array, self._notes.array, self._stride, rows, piece.rows, notes)
        self._load_candidates(piece.candidates, piece.candidate_notes.reshape(-1))

    def _load_candidates(self, keys: Keys, notes: Notes) -> None:
        done = cut.take_candidates(self._index, keys, notes, 0)
        while 0 <= done < keys.size:
            self._enlarge_index()
            done = cut.take_candidates(self._index, keys, notes, done)
        if done < 0:
            raise self._not_ours() if done == index.NOT_OURS else self._not_fitting("a key twice")

    def _sorted_entries(self, begin: int, end: int) -> tuple[Keys, Keys]:
        count = int(self._index.counts[begin:end].sum())
        slots, keys, rows = (np.empty(count, np.int64) for _ in range(3))
        index.collect(self._index, begin, end, slots, keys, rows)
        order = np.lexsort((keys, slots))
        return keys[order], rows[order]

    def _update_by_policy(self, parts: Sequence[RowPart], total: int, lr: float) -> None:
        keys, grads = _once_each(parts, total, self._spec.dim)
        if not policy.are_owned(self._index, keys):
            raise self._not_ours()
        self._expire()
        rows = index.find(self._index, keys)
        self._keep(keys, rows)
        policy.meet(
            self._index, self._notes.array, keys, self._updates, self._policy.min_count, self._policy.has_notes, rows
        )
        wanted = np.flatnonzero(rows == policy.WANTED)
        if wanted.size:
            self._make_wanted(wanted, keys, rows)
        self._make_candidates(keys[rows == policy.CANDIDATE])
        if rows.size and rows.min() < 0:
            grads, rows = grads[rows >= 0], rows[rows >= 0]
        apply_rows(self._spec.rule, self._rows.array, rows, grads, lr, self._updates)

    def _expire(self) -> None:
        rule = self._policy
        if rule.period:
            self._make_room_for_free_rows()
            most = int(self._index.used.max(initial=0))
            policy.expire(
                self._index, self._aside(), self._notes.array, self._updates, rule.period, rule.ttl, rule.candidate_ttl,
                most, np.empty(most, np.int64),
            )  # fmt: skip

    def _make_wanted(self, wanted: Integers, keys: Keys, rows: Rows) -> None:
        """Make rows for the wanted of `keys`, which `wanted` counts up, as far as there is room; fill in `rows`."""
        rule = self._policy
        if rule.max_rows:
            self._make_room_for_free_rows()
            wanted = wanted[np.lexsort((keys[wanted], slots_of(keys[wanted])))]
            is_kept = np.empty(wanted.size, np.bool_)
            spare = rule.max_rows // (SLOTS * policy.SPARE) + 1
            scratch = np.empty(3 * (wanted.size + spare + 1), np.int64)
            policy.make_room(
                self._index,
                self._aside(),
                self._notes.array,
                keys[wanted],
                rule.max_rows,
                self._updates,
                rule.by_count,
                scratch,
                is_kept,
            )
            wanted = wanted[is_kept]
        made = self._rows_of(keys[wanted])
        rows[wanted] = made
        if rule.has_notes:
            self._notes.reserve(2 * int(self._index.pool[index.ROWS]))
            policy.note_made(self._notes.array, made, self._updates, rule.min_count)

    def _make_candidates(self, keys: Keys) -> None:
        done = policy.make_candidates(self._index, keys, 0, self._updates)
        while done < keys.size:
            self._enlarge_index()
            done = policy.make_candidates(self._index, keys, done, self._updates)

    def _make_room_for_free_rows(self) -> None:
        self._index = self._index._replace(free_rows=_NO_ENTRIES)
        self._free_rows.reserve(int(self._index.pool[index.ROWS]))
        self._index = self._index._replace(free_rows=self._free_rows.array)

    def _not_fitting(self, what: str) -> CheckpointError:
        return CheckpointError(f"table {self._spec.name!r}: a checkpoint has {what}")

    def _not_ours(self) -> InvariantError:
        return InvariantError(f"table {self._spec.name!r}: a key of another pserver's slots came here")

    def _rows_of(self, keys: Keys) -> Keys:
        """The rows of `keys`, made where they are new."""
        rows, new = self._numbers_of(keys)
        if new.size:
            if self._cut is not None:
                aside.note_new(self._aside(), rows[new])
            self._make_rows(rows[new], keys[new])
        return rows

    def _numbers_of(self, keys: Keys) -> tuple[Keys, Integers]:
        """The numbers of the rows of `keys`, and where those stand in `keys` that were given now."""
        rows, new = np.empty(keys.size, np.int64), np.empty(keys.size, np.int64)
        done = made = 0
        while True:
            done, made = index.find_or_make(self._index, keys, done, made, rows, new)
            if done == keys.size:
                break
            if done == index.NOT_OURS:
                raise self._not_ours()
            self._enlarge_index()
        self._rows.reserve(int(self._index.pool[index.ROWS]) * self._stride)
        return rows, new[:made]

    def _aside(self) -> aside.Aside:
        """What kernels need of the cut under way, if any."""
        return _NO_ASIDE if self._cut is None else self._cut.aside(self._rows.array, self._notes.array)

    def _keep(self, keys: Keys, rows: Rows) -> None:
        """Copy what is about to change aside, where a cut shows it."""
        if self._cut is None:
            return
        kept, found = self._aside(), self._cut.scratch(rows.size)
        count = aside.find_unseen(kept, rows, found)
        if count:
            aside.keep(kept, self._index.first_slot, keys, rows, found[:count])

    def _enlarge_index(self) -> None:
        entries = max(index.UNIT * len(self._slots), self._entries.array.size)
        self._index = self._index._replace(entries=_NO_ENTRIES, free_class=_NO_CLASSES)
        self._entries.reserve(2 * entries)
        self._free_class.reserve(self._entries.array.size // (2 * index.UNIT))
        self._index = self._index._replace(entries=self._entries.array, free_class=self._free_class.array)

    def _make_rows(self, rows: Rows, keys: Keys) -> None:
        rules.make_rows(
            self._rows.array, self._stride, self._spec.dim, rows, keys,
            self._first, self._scratch, self._spec.rule.initial_state,
        )  # fmt: skip


def _once_each(parts: Sequence[RowPart], total: int, dim: int) -> tuple[Keys, Floats]:
    """The same as `mean_rows`, without copying where the parts are that already."""
    if len(parts) == 1 and parts[0][2] == total and unique(parts[0][0])[0].size == parts[0][0].size:
        return parts[0][0], parts[0][1]
    return mean_rows(parts, total, dim)
