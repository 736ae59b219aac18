"""One embedding table's rows on one pserver."""

from collections.abc import Sequence

import numpy as np

from evergrad.errors import InvariantError
from evergrad.kernels import index, rules
from evergrad.kernels.hashing import unique
from evergrad.kernels.initial import first_values, scratch_for, table_seed, zeros_of
from evergrad.kernels.merge import add_rows, divide, has_duplicates
from evergrad.messages import AnyArray, ExportPart, Floats, Keys, TableSpec
from evergrad.pserver.arena import Arena
from evergrad.pserver.rules import apply_rows

TablePart = tuple[Keys, Floats, int]
"""What one task contributes: keys, their gradients (n, dim), samples."""


_NO_ENTRIES = np.empty(0, np.int64)
_NO_CLASSES = np.empty(0, np.uint8)


class Table:
    """The rows of the owned slots of one table.

    Invariants:
        1. Row numbers are 0 .. len - 1 in the order in which rows were made; row r is `[value | state]` at
           `r * stride` of the arena.
        2. Values and the export depend on seed, table and updates only: not on the owned slots, nor on pulls.
    """

    def __init__(self, spec: TableSpec, seed: int, slots: range) -> None:
        self._spec = spec
        self._slots = slots
        number = table_seed(seed, spec.name)
        self._first, self._zeros = first_values(spec.initializer, spec.dim, number), zeros_of(number)
        self._scratch = scratch_for(spec.dim)
        self._stride = spec.rule.row_width(spec.dim)
        self._updates = 0
        self._length = 0
        self._rows: Arena[np.float32] = Arena(np.float32)
        self._entries: Arena[np.int64] = Arena(np.int64)
        self._free_class: Arena[np.uint8] = Arena(np.uint8)
        self._index = index.empty_index(slots)

    def __len__(self) -> int:
        return self._length

    def pull(self, keys: Keys, evaluating: bool) -> Floats:
        """Copy the rows of `keys`; changes nothing.

        Args:
            keys: shape (n,); duplicates allowed; all owned by this pserver.
            evaluating: a key without a row yields zeros if the table says so, and its initial value otherwise.

        Returns:
            Shape (n, dim), row i for `keys[i]`; a fresh array the caller may change.
        Cost: n probes, n * dim * 4 bytes copied.
        """
        rows = index.find(self._index, keys)
        out = np.empty((keys.size, self._spec.dim), np.float32)
        first = self._zeros if evaluating and self._spec.unseen_zero else self._first
        rules.copy_rows(self._rows.array, self._stride, rows, keys, first, self._scratch, out)
        return out

    def update(self, parts: Sequence[TablePart], total: int, lr: float) -> None:
        """Make the rows that are new and apply the rule once to each key, with its mean gradient.

        A key's gradient is the sum of samples * gradient over the parts, taken in order in float64, divided by `total`
        and rounded once; for one part of `total` samples that is its gradient itself. A key that stands twice in a
        part has its gradients summed. One call is one update of the table, also without keys.

        Args:
            parts: in task order; keys all owned by this pserver.
            total: samples of the whole step, those of tasks without keys here too.
            lr: the step's learning rate.

        Cost: n probes, n rows read and written; several parts take n * dim * 8 bytes of scratch.
        """
        self._updates += 1
        if len(parts) == 1 and parts[0][2] == total:
            keys, grads, _ = parts[0]
            rows = self._rows_of(keys)
            if not has_duplicates(rows):
                apply_rows(self._spec.rule, self._rows.array, rows, grads, lr, self._updates)
                return
        keys, grads = _mean(parts, total, self._spec.dim)
        rows = self._rows_of(keys)
        apply_rows(self._spec.rule, self._rows.array, rows, grads, lr, self._updates)

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
        rules.copy_rows(self._rows.array, self._stride, rows, keys, self._zeros, self._scratch, out)
        return out, following

    def _sorted_entries(self, begin: int, end: int) -> tuple[Keys, Keys]:
        count = int(self._index.counts[begin:end].sum())
        slots, keys, rows = (np.empty(count, np.int64) for _ in range(3))
        index.collect(self._index, begin, end, slots, keys, rows)
        order = np.lexsort((keys, slots))
        return keys[order], rows[order]

    def _rows_of(self, keys: Keys) -> Keys:
        """The rows of `keys`, made where they are new."""
        rows = np.empty(keys.size, np.int64)
        new_keys = np.empty(keys.size, np.int64)
        done = made = 0
        while True:
            done, made = index.find_or_make(self._index, keys, done, made, rows, new_keys)
            if done == keys.size:
                break
            if done == index.NOT_OURS:
                raise InvariantError(f"table {self._spec.name!r}: a key of another pserver's slots was pushed here")
            self._enlarge_index()
        self._make_rows(new_keys[:made])
        return rows

    def _enlarge_index(self) -> None:
        entries = max(index.UNIT * len(self._slots), self._entries.array.size)
        self._index = self._index._replace(entries=_NO_ENTRIES, free_class=_NO_CLASSES)
        self._entries.reserve(2 * entries)
        self._free_class.reserve(self._entries.array.size // (2 * index.UNIT))
        self._index = self._index._replace(entries=self._entries.array, free_class=self._free_class.array)

    def _make_rows(self, keys: Keys) -> None:
        self._rows.reserve((self._length + keys.size) * self._stride)
        rules.make_rows(
            self._rows.array, self._stride, self._spec.dim, self._length, keys,
            self._first, self._scratch, self._spec.rule.initial_state,
        )  # fmt: skip
        self._length += keys.size


def _mean(parts: Sequence[TablePart], total: int, dim: int) -> tuple[Keys, Floats]:
    """The different keys of all parts, and for each its sum of samples * gradient over `total`."""
    keys, numbers = unique(np.concatenate([np.empty(0, np.int64), *(keys for keys, _, _ in parts)]))
    sums = np.zeros((keys.size, dim))
    start = 0
    for part, grads, samples in parts:
        add_rows(sums, numbers[start : start + part.size], grads, samples)
        start += part.size
    means = np.empty((keys.size, dim), np.float32)
    divide(sums.reshape(-1), total, means.reshape(-1))
    return keys, means
