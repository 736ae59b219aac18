"""The hash index of a table: from key to row number, in one small region for each slot.

All regions lie in one pool of entries (key, row). A region has a power of two of entries, is probed linearly from the
beginning of a cache line on and is replaced by one twice as large when about three quarters full, so growth moves a few
entries at a time. A deleted entry leaves no mark: those behind it move up. A region that has become far too large is
replaced by a smaller one. Freed regions are merged with their neighbours (a buddy system) and used again, and so are
the numbers of deleted rows.

Invariants:
    1. A region of 2**c entries starts at a multiple of 2**c.
    2. An entry is empty where its row is EMPTY; no key is reserved. A row below EMPTY is a candidate: a key that has
       been met and has no row yet (`kernels/policy.py`).
    3. `regions[s]` is the start and class of slot s's region packed by `_pack`, or -1 while the slot has no entry.
    4. A free region's first entry holds (next, previous) of the list of its class; `free_class` holds its class + 1
       at its first unit of `UNIT` entries and 0 everywhere else.
    5. The numbers 0 .. `pool[ROWS]` - 1 are those of the rows and the first `pool[FREE]` of `free_rows`, each once.
    6. An entry's home is the first of a unit, and between it and the entry no entry is empty. So what is used of a unit
       comes first in it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Integers, Keys, Rows
from evergrad.kernels.aside import ASIDE, Aside, keep_entry
from evergrad.kernels.entry import EMPTY, Integer
from evergrad.kernels.hashing import SLOT_SHIFT, hash_key
from evergrad.kernels.jit import i64, inline, kernel, pair, prefetch, reads, record, u8, void, writes
from evergrad.kernels.lanes import row_in_line

UNIT_CLASS = 2
UNIT = 1 << UNIT_CLASS
"""Entries of the smallest region: one cache line."""
CLASSES = 48
TOP = CLASSES
ROWS = CLASSES + 1
FREE = CLASSES + 2
"""`pool[TOP]` is the end of the used part of the entries, `pool[c]` the first free region of class c or -1;
`pool[ROWS]` is one more than the greatest number of a row so far, `pool[FREE]` how many of these are free."""

NOT_OURS = -1
"""As the count of keys done: a key belongs to a slot that is not owned."""
_AHEAD = 40
_FURTHER = 16
"""So long before the home of a key is asked for its slot's region is, which nobody has used for a while where there are
many tables."""
_LEAST_FULL, _SPREAD = 76, 32
"""A slot's region is enlarged when 76 to 107 of 128 entries are used, by the slot's number: slots have about the same
number of rows, and would else all be enlarged by the same few updates."""
_CLASS_BITS = 6
_CLASS_MASK = (1 << _CLASS_BITS) - 1


class Index(NamedTuple):
    """The arrays of an index: what kernels see of it. All but `first_slot` are written."""

    first_slot: int
    regions: Integers
    """For each slot the packed region (invariant 3)."""
    counts: Integers
    """For each slot how many rows it has."""
    used: Integers
    """For each slot how many entries of its region are not empty."""
    pool: Integers
    free_class: NDArray[np.uint8]
    entries: Integers
    """Key and row alternating."""
    free_rows: Rows
    """The numbers of deleted rows, reused last in first out. Before deleting it has room for `pool[ROWS]`."""


INDEX = record(Index, i64, writes(i64), writes(i64), writes(i64), writes(i64), writes(u8), writes(i64), writes(i64))


def empty_index(slots: range) -> Index:
    """An index of these slots without rows and without room for any."""
    pool = np.full(CLASSES + 3, -1, np.int64)
    pool[TOP] = pool[ROWS] = pool[FREE] = 0
    return Index(
        slots.start,
        np.full(len(slots), -1, np.int64),
        np.zeros(len(slots), np.int64),
        np.zeros(len(slots), np.int64),
        pool,
        np.empty(0, np.uint8),
        np.empty(0, np.int64),
        np.empty(0, np.int64),
    )


@inline
def _pack(start: Integer, size_class: Integer) -> Integer:
    return (start << _CLASS_BITS) | size_class


@inline
def _first(hashed: np.uint64, mask: Integer) -> Integer:
    """Where in a region of `mask` + 1 entries probing begins: with a cache line."""
    at: Integer = np.int64(hashed) & mask & -UNIT
    return at


@inline
def _take_out(index: Index, start: Integer, size_class: Integer) -> None:
    """Remove a free region from the list of its class."""
    following = index.entries[2 * start]
    previous = index.entries[2 * start + 1]
    if previous < 0:
        index.pool[size_class] = following
    else:
        index.entries[2 * previous] = following
    if following >= 0:
        index.entries[2 * following + 1] = previous
    index.free_class[start >> UNIT_CLASS] = 0


@inline
def _put_in(index: Index, start: Integer, size_class: Integer) -> None:
    """Add a free region to the list of its class."""
    first = index.pool[size_class]
    index.entries[2 * start] = first
    index.entries[2 * start + 1] = -1
    if first >= 0:
        index.entries[2 * first + 1] = start
    index.pool[size_class] = start
    index.free_class[start >> UNIT_CLASS] = size_class + 1


@inline
def _free(index: Index, start: Integer, size_class: Integer) -> None:
    """Give a region back, merged with its other half as long as that is free too."""
    while True:
        other = start ^ (1 << size_class)
        if other >= index.pool[TOP] or index.free_class[other >> UNIT_CLASS] != size_class + 1:
            break
        _take_out(index, other, size_class)
        start = min(start, other)
        size_class += 1
    _put_in(index, start, size_class)


@inline
def _allocate(index: Index, size_class: Integer) -> Integer:
    """The start of an empty region of this class, or -1 where the entries do not suffice."""
    found = size_class
    while found < CLASSES and index.pool[found] < 0:
        found += 1
    if found < CLASSES:
        start: Integer = index.pool[found]
        _take_out(index, start, found)
        while found > size_class:
            found -= 1
            _put_in(index, start + (1 << found), found)
    else:
        size = 1 << size_class
        start = (index.pool[TOP] + size - 1) & ~(size - 1)
        if 2 * (start + size) > index.entries.size:
            return -1
        while index.pool[TOP] < start:
            low = UNIT_CLASS
            while not index.pool[TOP] & (1 << low):
                low += 1
            gap = index.pool[TOP]
            index.pool[TOP] += 1 << low
            _free(index, gap, low)
        index.pool[TOP] = start + size
    for at in range(start, start + (1 << size_class)):
        index.entries[2 * at] = 0
        index.entries[2 * at + 1] = EMPTY
    return start


@inline
def _settle(index: Index, start: Integer, mask: Integer, key: np.int64, row: Integer) -> None:
    """Write an entry for a key that has none into the region."""
    to = _first(hash_key(key), mask)
    while index.entries[2 * (start + to) + 1] != EMPTY:
        to = (to + 1) & mask
    index.entries[2 * (start + to)] = key
    index.entries[2 * (start + to) + 1] = row


@inline
def _move(index: Index, slot: Integer, size_class: Integer) -> bool:
    """Give a slot a region of this class, which its entries fit in; False where the pool does not suffice."""
    packed = index.regions[slot]
    start = _allocate(index, size_class)
    if start < 0:
        return False
    index.regions[slot] = _pack(start, size_class)
    if packed >= 0:
        old, old_class = packed >> _CLASS_BITS, packed & _CLASS_MASK
        for at in range(old, old + (1 << old_class)):
            if index.entries[2 * at + 1] != EMPTY:
                _settle(index, start, (1 << size_class) - 1, index.entries[2 * at], index.entries[2 * at + 1])
        _free(index, old, old_class)
    return True


@inline
def _probe(index: Index, packed: Integer, key: np.int64, hashed: np.uint64) -> Integer:
    """The entry that holds `key`, or the empty one where it would go."""
    start = packed >> _CLASS_BITS
    mask = (1 << (packed & _CLASS_MASK)) - 1
    at = _first(hashed, mask)
    while index.entries[2 * (start + at) + 1] != EMPTY and index.entries[2 * (start + at)] != key:
        at = (at + 1) & mask
    return start + at


@inline
def _home(index: Index, hashed: np.uint64) -> Integer:
    """Where probing for a key of this hash begins, or -1 if its slot has no region or is not owned.

    Starts loading that entry and those after it: two lines, for the processor asks for the second by itself as soon as
    the first is read, and that would wait for memory.
    """
    slot = np.int64(hashed >> SLOT_SHIFT) - index.first_slot
    if slot < 0 or slot >= index.regions.size:
        return -1
    packed = index.regions[slot]
    if packed < 0:
        return -1
    at: Integer = (packed >> _CLASS_BITS) + _first(hashed, (1 << (packed & _CLASS_MASK)) - 1)
    prefetch(index.entries, 2 * at)
    prefetch(index.entries, 2 * (at + UNIT))
    return at


@inline
def _hash_ahead(index: Index, keys: Keys, rows: Rows, begin: Integer, i: Integer) -> None:
    """What keys after the i-th need before their rows can be found, each a little before the next.

    Key `i + _AHEAD + _FURTHER` is hashed and its region asked for, key `i + _AHEAD` has its home in `rows` then.
    """
    later, soon = i + _AHEAD + _FURTHER, i + _AHEAD
    if later < keys.size:
        hashed = hash_key(keys[later])
        rows[later] = np.int64(hashed)
        prefetch(index.regions, np.int64(hashed >> SLOT_SHIFT) - index.first_slot)
    if begin <= soon < keys.size:
        rows[soon] = _home(index, np.uint64(rows[soon]))


@inline
def _row_from(index: Index, home: Integer, key: np.int64) -> Integer:
    """The row of a key whose probing begins at the entry `home`, or a negative number where it has none."""
    row: Integer = row_in_line(index.entries, 2 * home, key)
    if row == EMPTY and index.entries[2 * (home + UNIT - 1) + 1] != EMPTY:
        hashed = hash_key(key)
        at = _probe(index, index.regions[np.int64(hashed >> SLOT_SHIFT) - index.first_slot], key, hashed)
        row = index.entries[2 * at + 1]
    return row


def find(index: Index, keys: Keys) -> Rows:
    """The row of each key, or a negative number where it has none. Changes nothing."""
    rows = np.empty(keys.size, np.int64)
    _find(index, keys, rows)
    return rows


@kernel(void, INDEX, reads(i64), writes(i64))
def _find(index: Index, keys: Keys, rows: Rows) -> None:
    for i in range(-_AHEAD - _FURTHER, keys.size):
        _hash_ahead(index, keys, rows, 0, i)
        if i >= 0 and rows[i] >= 0:
            rows[i] = _row_from(index, rows[i], keys[i])


@inline
def has_room(index: Index, slot: Integer) -> bool:
    """Whether a slot's region takes another entry, enlarged if need be; False where the entries do not suffice."""
    packed = index.regions[slot]
    if packed < 0:
        return bool(_move(index, slot, UNIT_CLASS))
    size_class = packed & _CLASS_MASK
    if index.used[slot] < (_LEAST_FULL + slot % _SPREAD << size_class) >> 7:
        return True
    return bool(_move(index, slot, size_class + 1))


@inline
def settle(index: Index, slot: Integer, key: np.int64, row: Integer) -> None:
    """Write an entry for a key that has none; its slot has room."""
    packed = index.regions[slot]
    _settle(index, packed >> _CLASS_BITS, (1 << (packed & _CLASS_MASK)) - 1, key, row)
    index.used[slot] += 1


@inline
def _next_row(index: Index) -> Integer:
    """A number for a new row."""
    if index.pool[FREE] > 0:
        index.pool[FREE] -= 1
        row: Integer = index.free_rows[index.pool[FREE]]
    else:
        row = index.pool[ROWS]
        index.pool[ROWS] += 1
    return row


@kernel(pair(i64), INDEX, reads(i64), i64, i64, writes(i64), writes(i64))
def find_or_make(index: Index, keys: Keys, begin: int, made: int, rows: Rows, new: Integers) -> tuple[int, int]:
    """Write the row of each key from `keys[begin]` on, giving a key without one a number that is free.

    `made` is how many rows were made by earlier calls for these `keys`; `new` receives where in `keys` those stand for
    which a row was made.

    Returns:
        How many keys are done in all (fewer than `keys` where the entries do not suffice: enlarge them and call again;
        NOT_OURS for a key of another pserver) and how many rows are made in all.
    """
    n = keys.size
    moved = begin  # the homes of keys before it may be out of date
    for i in range(begin - _AHEAD - _FURTHER, n):
        _hash_ahead(index, keys, rows, begin, i)
        if i < begin:
            continue
        key = keys[i]
        if i >= moved and rows[i] >= 0:
            row = _row_from(index, rows[i], key)
            if row >= 0:
                rows[i] = row
                continue
        hashed = hash_key(key)
        slot = np.int64(hashed >> SLOT_SHIFT) - index.first_slot
        if slot < 0 or slot >= index.regions.size:
            return NOT_OURS, made
        found: Integer = EMPTY
        at: Integer = -1
        if index.regions[slot] >= 0:
            at = _probe(index, index.regions[slot], key, hashed)
            found = index.entries[2 * at + 1]
        if found == EMPTY:
            before = index.regions[slot]
            if not has_room(index, slot):
                return i, made
            if index.regions[slot] != before:
                moved = i + _AHEAD + 1
                at = _probe(index, index.regions[slot], key, hashed)
            index.used[slot] += 1
        if found < 0:
            found = _next_row(index)
            index.counts[slot] += 1
            index.entries[2 * at] = key
            index.entries[2 * at + 1] = found
            new[made] = i
            made += 1
        rows[i] = found
    return n, made


@inline
def entry_of(index: Index, key: np.int64) -> Integer:
    """The entry of a key, of a candidate too, or -1."""
    hashed = hash_key(key)
    slot = np.int64(hashed >> SLOT_SHIFT) - index.first_slot
    if slot < 0 or slot >= index.regions.size or index.regions[slot] < 0:
        return -1
    at = _probe(index, index.regions[slot], key, hashed)
    return at if index.entries[2 * at + 1] != EMPTY else -1


@inline
def remove(index: Index, aside: Aside, slot: Integer, at: Integer) -> None:
    """Remove the entry `at` of a slot; its row's number is free then. Entries behind it move up."""
    packed = index.regions[slot]
    start, mask = packed >> _CLASS_BITS, (1 << (packed & _CLASS_MASK)) - 1
    row = index.entries[2 * at + 1]
    keep_entry(aside, slot, index.entries[2 * at], row)
    if row >= 0:
        index.free_rows[index.pool[FREE]] = row
        index.pool[FREE] += 1
        index.counts[slot] -= 1
    index.used[slot] -= 1
    hole = at - start
    to = (hole + 1) & mask
    while index.entries[2 * (start + to) + 1] != EMPTY:
        home = _first(hash_key(index.entries[2 * (start + to)]), mask)
        if ((to - home) & mask) >= ((to - hole) & mask):
            index.entries[2 * (start + hole)] = index.entries[2 * (start + to)]
            index.entries[2 * (start + hole) + 1] = index.entries[2 * (start + to) + 1]
            hole = to
        to = (to + 1) & mask
    index.entries[2 * (start + hole)] = 0
    index.entries[2 * (start + hole) + 1] = EMPTY


@inline
def cut_down(index: Index, slot: Integer) -> None:
    """Free a slot's region that has no entries, and replace one that could be a quarter as large, if there is room."""
    packed = index.regions[slot]
    if packed < 0:
        return
    size_class = packed & _CLASS_MASK
    if index.used[slot] == 0:
        index.regions[slot] = -1
        _free(index, packed >> _CLASS_BITS, size_class)
        return
    fits: Integer = UNIT_CLASS
    while 8 * index.used[slot] > 3 * (1 << fits):
        fits += 1
    if fits + 2 <= size_class:
        _move(index, slot, fits)


@kernel(i64, INDEX, ASIDE, reads(i64))
def delete(index: Index, aside: Aside, keys: Keys) -> int:
    """Delete the entries of those keys that have one here; returns how many there were."""
    deleted = 0
    for i in range(keys.size):
        if i + _AHEAD < keys.size:
            _home(index, hash_key(keys[i + _AHEAD]))
        at = entry_of(index, keys[i])
        if at >= 0:
            slot = np.int64(hash_key(keys[i]) >> SLOT_SHIFT) - index.first_slot
            remove(index, aside, slot, at)
            cut_down(index, slot)
            deleted += 1
    return deleted


@inline
def span_of(index: Index, slot: Integer) -> tuple[Integer, Integer]:
    """The first entry of a slot's region and the one after its last; nothing where it has no region."""
    packed = index.regions[slot]
    if packed < 0:
        return 0, 0
    start = packed >> _CLASS_BITS
    return start, start + (1 << (packed & _CLASS_MASK))


@kernel(void, INDEX, i64, i64, writes(i64), writes(i64), writes(i64))
def collect(index: Index, begin: int, end: int, slots: Integers, keys: Keys, rows: Rows) -> None:
    """List slot, key and row of all rows of the slots from `begin` up to `end`, slot by slot."""
    count = 0
    for slot in range(begin, end):
        start, stop = span_of(index, slot)
        for at in range(start, stop):
            if index.entries[2 * at + 1] >= 0:
                slots[count] = slot
                keys[count] = index.entries[2 * at]
                rows[count] = index.entries[2 * at + 1]
                count += 1
