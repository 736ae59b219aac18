"""The hash index of a table: from key to row number, in one small region for each slot.

All regions lie in one pool of entries (key, row). A region has a power of two of entries, is probed linearly and is
replaced by one twice as large when three quarters full, so growth moves a few entries at a time. Freed regions are
merged with their neighbours (a buddy system) and used again.

Invariants:
    1. A region of 2**c entries starts at a multiple of 2**c.
    2. An entry is empty where its row is EMPTY; no key is reserved.
    3. `regions[s]` is the start and class of slot s's region packed by `_pack`, or -1 while the slot has no row.
    4. A free region's first entry holds (next, previous) of the list of its class; `free_class` holds its class + 1
       at its first unit of `UNIT` entries and 0 everywhere else.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Integers, Keys, Rows
from evergrad.kernels.hashing import SLOT_SHIFT, hash_key
from evergrad.kernels.jit import i64, inline, kernel, pair, prefetch, reads, record, u8, void, writes

Integer = int | np.int64

EMPTY = -1
UNIT_CLASS = 2
UNIT = 1 << UNIT_CLASS
"""Entries of the smallest region: one cache line."""
CLASSES = 48
TOP = CLASSES
"""`pool[TOP]` is the end of the used part of the entries, `pool[c]` the first free region of class c or -1."""

NOT_OURS = -1
"""As the count of keys done: a key belongs to a slot that is not owned."""
_AHEAD = 16
_CLASS_BITS = 6
_CLASS_MASK = (1 << _CLASS_BITS) - 1


class Index(NamedTuple):
    """The arrays of an index: what kernels see of it. All but `first_slot` are written."""

    first_slot: int
    regions: Integers
    """For each slot the packed region (invariant 3)."""
    counts: Integers
    """For each slot how many rows it has."""
    pool: Integers
    free_class: NDArray[np.uint8]
    entries: Integers
    """Key and row alternating."""


INDEX = record(Index, i64, writes(i64), writes(i64), writes(i64), writes(u8), writes(i64))


def empty_index(slots: range) -> Index:
    """An index of these slots without rows and without room for any."""
    pool = np.full(CLASSES + 1, -1, np.int64)
    pool[TOP] = 0
    return Index(
        slots.start,
        np.full(len(slots), -1, np.int64),
        np.zeros(len(slots), np.int64),
        pool,
        np.empty(0, np.uint8),
        np.empty(0, np.int64),
    )


@inline
def _pack(start: Integer, size_class: Integer) -> Integer:
    return (start << _CLASS_BITS) | size_class


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
def _enlarge(index: Index, slot: Integer) -> bool:
    """Give a slot its first region or one twice as large; False where the entries do not suffice."""
    packed = index.regions[slot]
    if packed < 0:
        start = _allocate(index, UNIT_CLASS)
        if start >= 0:
            index.regions[slot] = _pack(start, UNIT_CLASS)
        return bool(start >= 0)
    old, old_class = packed >> _CLASS_BITS, packed & _CLASS_MASK
    start = _allocate(index, old_class + 1)
    if start < 0:
        return False
    mask = (2 << old_class) - 1
    for at in range(old, old + (1 << old_class)):
        if index.entries[2 * at + 1] != EMPTY:
            to = np.int64(hash_key(index.entries[2 * at])) & mask
            while index.entries[2 * (start + to) + 1] != EMPTY:
                to = (to + 1) & mask
            index.entries[2 * (start + to)] = index.entries[2 * at]
            index.entries[2 * (start + to) + 1] = index.entries[2 * at + 1]
    index.regions[slot] = _pack(start, old_class + 1)
    _free(index, old, old_class)
    return True


@inline
def _probe(index: Index, packed: Integer, key: np.int64, hashed: np.uint64) -> Integer:
    """The entry that holds `key`, or the empty one where it would go."""
    start = packed >> _CLASS_BITS
    mask = (1 << (packed & _CLASS_MASK)) - 1
    at = np.int64(hashed) & mask
    while index.entries[2 * (start + at) + 1] != EMPTY and index.entries[2 * (start + at)] != key:
        at = (at + 1) & mask
    return start + at


@inline
def _prefetch_entry(index: Index, key: np.int64) -> None:
    hashed = hash_key(key)
    slot = np.int64(hashed >> SLOT_SHIFT) - index.first_slot
    if 0 <= slot < index.regions.size:
        packed = index.regions[slot]
        if packed >= 0:
            at = np.int64(hashed) & ((1 << (packed & _CLASS_MASK)) - 1)
            prefetch(index.entries, 2 * ((packed >> _CLASS_BITS) + at))


@kernel(writes(i64), INDEX, reads(i64))
def find(index: Index, keys: Keys) -> Rows:
    """The row of each key, or EMPTY where it has none. Changes nothing."""
    n = keys.size
    rows = np.empty(n, np.int64)
    for i in range(min(_AHEAD, n)):
        _prefetch_entry(index, keys[i])
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch_entry(index, keys[i + _AHEAD])
        hashed = hash_key(keys[i])
        slot = np.int64(hashed >> SLOT_SHIFT) - index.first_slot
        rows[i] = EMPTY
        if 0 <= slot < index.regions.size and index.regions[slot] >= 0:
            rows[i] = index.entries[2 * _probe(index, index.regions[slot], keys[i], hashed) + 1]
    return rows


@kernel(pair(i64), INDEX, reads(i64), i64, i64, writes(i64), writes(i64))
def find_or_make(index: Index, keys: Keys, begin: int, made: int, rows: Rows, new_keys: Keys) -> tuple[int, int]:
    """Write the row of each key from `keys[begin]` on, giving a new key the next number after all rows so far.

    `made` is how many rows were made by earlier calls for these `keys`;
    `new_keys` receives the keys of the rows made, in the order of their numbers.

    Returns:
        How many keys are done in all (fewer than `keys` where the entries do not suffice: enlarge them and call again;
        NOT_OURS for a key of another pserver) and how many rows are made in all.
    """
    n = keys.size
    total = np.sum(index.counts)
    for i in range(begin, min(begin + _AHEAD, n)):
        _prefetch_entry(index, keys[i])
    for i in range(begin, n):
        if i + _AHEAD < n:
            _prefetch_entry(index, keys[i + _AHEAD])
        key = keys[i]
        hashed = hash_key(key)
        slot = np.int64(hashed >> SLOT_SHIFT) - index.first_slot
        if slot < 0 or slot >= index.regions.size:
            return NOT_OURS, made
        at: Integer = -1
        if index.regions[slot] >= 0:
            at = _probe(index, index.regions[slot], key, hashed)
            if index.entries[2 * at + 1] != EMPTY:
                rows[i] = index.entries[2 * at + 1]
                continue
        room = 3 * (1 << (index.regions[slot] & _CLASS_MASK)) // 4 if index.regions[slot] >= 0 else 0
        if index.counts[slot] >= room:
            if not _enlarge(index, slot):
                return i, made
            at = _probe(index, index.regions[slot], key, hashed)
        index.entries[2 * at] = key
        index.entries[2 * at + 1] = total
        rows[i] = total
        new_keys[made] = key
        index.counts[slot] += 1
        total += 1
        made += 1
    return n, made


@kernel(void, INDEX, i64, i64, writes(i64), writes(i64), writes(i64))
def collect(index: Index, begin: int, end: int, slots: Integers, keys: Keys, rows: Rows) -> None:
    """List slot, key and row of all entries of the slots from `begin` up to `end`, slot by slot."""
    count = 0
    for slot in range(begin, end):
        if index.regions[slot] >= 0:
            start = index.regions[slot] >> _CLASS_BITS
            for at in range(start, start + (1 << (index.regions[slot] & _CLASS_MASK))):
                if index.entries[2 * at + 1] != EMPTY:
                    slots[count] = slot
                    keys[count] = index.entries[2 * at]
                    rows[count] = index.entries[2 * at + 1]
                    count += 1
