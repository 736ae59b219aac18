"""Which keys have rows: counting candidates, expiry, and making room, over the index of a table.

A *note* is what is kept of a row for this: the step it was last met in and the number of steps it was met in, two
integers. A candidate, a key met that has no row yet, keeps the same two numbers in its entry, in place of the row.

What these kernels decide depends on keys, slots, steps and notes only: not on row numbers or on the order of entries.
"""

import numpy as np

from evergrad.kernels.arrays import Integers, Keys, Rows
from evergrad.kernels.aside import ASIDE, Aside
from evergrad.kernels.entry import EMPTY, MOST, Integer, as_candidate, count_of, last_of
from evergrad.kernels.hashing import SLOT_SHIFT, hash_key
from evergrad.kernels.index import INDEX, Index, cut_down, entry_of, has_room, remove, settle, span_of
from evergrad.kernels.jit import flag, i32, i64, inline, kernel, prefetch, reads, void, writes
from evergrad.placement import SLOTS

Notes = np.ndarray[tuple[int], np.dtype[np.int32]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]

NONE, CANDIDATE, WANTED = -1, -2, -3
"""In place of a row's number: a candidate met again; a candidate to be; a key that is to have a row."""
SPARE = 16
"""A slot that is full makes room for this part of its share at once, for all its rows must be searched for it."""
_AHEAD = 32


@kernel(void, INDEX, writes(i32), reads(i64), i64, i64, flag, writes(i64))
def meet(index: Index, notes: Notes, keys: Keys, step: int, min_count: int, has_notes: bool, rows: Rows) -> None:
    """Note that these different keys, already looked up in `rows`, are met in this step.

    A number that is negative in `rows` becomes NONE, CANDIDATE or WANTED. Candidates are counted here; entries are
    neither made nor moved.
    """
    for i in range(keys.size):
        row = rows[i]
        if has_notes and i + _AHEAD < keys.size:
            prefetch(notes, 2 * rows[i + _AHEAD])
        if row >= 0:
            if has_notes:
                notes[2 * row] = step
                notes[2 * row + 1] = min(notes[2 * row + 1] + 1, MOST)
            continue
        at = entry_of(index, keys[i])
        count: Integer = 1
        if at >= 0:
            count = min(count_of(index.entries[2 * at + 1]) + 1, MOST)
            index.entries[2 * at + 1] = as_candidate(step, count)
        if count >= min_count:
            rows[i] = WANTED
        else:
            rows[i] = NONE if at >= 0 else CANDIDATE


@kernel(i64, INDEX, reads(i64), i64, i64)
def make_candidates(index: Index, keys: Keys, begin: int, step: int) -> int:
    """Make entries for keys that have none, as candidates met once; returns how many are done, as `find_or_make`."""
    for i in range(begin, keys.size):
        hashed = hash_key(keys[i])
        slot = np.int64(hashed >> SLOT_SHIFT) - index.first_slot
        if not has_room(index, slot):
            return i
        settle(index, slot, keys[i], as_candidate(step, 1))
    return keys.size


@kernel(void, writes(i32), reads(i64), i64, i64)
def note_made(notes: Notes, rows: Rows, step: int, count: int) -> None:
    """Write the notes of rows just made."""
    for i in range(rows.size):
        notes[2 * rows[i]] = step
        notes[2 * rows[i] + 1] = count


@kernel(i64, INDEX, ASIDE, reads(i32), i64, i64, i64, i64, i64, writes(i64))
def expire(
    index: Index, aside: Aside, notes: Notes, step: int, period: int, ttl: int, candidate_ttl: int, most: int,
    expired: Keys,
) -> Integer:  # fmt: skip
    """Remove what was not met for too long from the slots s with s % period == step % period.

    A row is removed when it was last met more than `ttl` steps ago (never, for a negative `ttl`), a candidate when that
    is more than `candidate_ttl` ago. `expired` is scratch for `most` keys, enough for any slot's.

    Returns:
        How many rows and candidates were removed.
    """
    removed: Integer = 0
    first = (step % period - index.first_slot) % period
    for slot in range(first, index.regions.size, period):
        count = 0
        start, stop = span_of(index, slot)
        for at in range(start, min(start + _AHEAD, stop)):
            prefetch(notes, 2 * index.entries[2 * at + 1])
        for at in range(start, stop):
            if at + _AHEAD < stop:
                prefetch(notes, 2 * index.entries[2 * (at + _AHEAD) + 1])
            row = index.entries[2 * at + 1]
            if row >= 0:
                is_old = ttl >= 0 and step - notes[2 * row] > ttl
            else:
                is_old = row != EMPTY and step - last_of(row) > candidate_ttl
            if is_old and count < most:
                expired[count] = index.entries[2 * at]
                count += 1
        for i in range(count):
            remove(index, aside, slot, entry_of(index, expired[i]))
        if count:
            cut_down(index, slot)
        removed += count
    return removed


@inline
def share_of(slot: Integer, max_rows: int) -> Integer:
    """How many rows a slot may have: an equal share of `max_rows`, rounded so that they add up to it; at least one."""
    return max(1, max_rows * (slot + 1) // SLOTS - max_rows * slot // SLOTS)


@inline
def _is_before(a: Integers, i: Integer, b: Integers, j: Integer) -> bool:
    """Compare two victims (count, last step, key)."""
    for k in range(3):
        if a[3 * i + k] != b[3 * j + k]:
            return bool(a[3 * i + k] < b[3 * j + k])
    return False


@inline
def _first_victims(
    index: Index, notes: Notes, slot: Integer, step: int, by_count: bool, victims: Integers, most: Integer
) -> Integer:
    """Write the first `most` of a slot's rows not met in this step, in their order, to `victims`; returns how many."""
    found: Integer = 0
    start, stop = span_of(index, slot)
    for at in range(start, min(start + _AHEAD, stop)):
        prefetch(notes, 2 * index.entries[2 * at + 1])
    for at in range(start, stop):
        if at + _AHEAD < stop:
            prefetch(notes, 2 * index.entries[2 * (at + _AHEAD) + 1])
        row = index.entries[2 * at + 1]
        if row < 0 or notes[2 * row] == step:
            continue
        # the room behind the victims holds the one that is looked at
        victims[3 * most] = notes[2 * row + 1] if by_count else 0
        victims[3 * most + 1] = notes[2 * row]
        victims[3 * most + 2] = index.entries[2 * at]
        if found == most and not _is_before(victims, most, victims, found - 1):
            continue
        to = found if found < most else found - 1
        while to > 0 and _is_before(victims, most, victims, to - 1):
            for k in range(3):
                victims[3 * to + k] = victims[3 * (to - 1) + k]
            to -= 1
        for k in range(3):
            victims[3 * to + k] = victims[3 * most + k]
        found = min(found + 1, most)
    return found


@kernel(i64, INDEX, ASIDE, reads(i32), reads(i64), i64, i64, flag, writes(i64), writes(flag))
def make_room(
    index: Index,
    aside: Aside,
    notes: Notes,
    keys: Keys,
    max_rows: int,
    step: int,
    by_count: bool,
    victims: Integers,
    is_kept: Flags,
) -> Integer:
    """Remove rows of slots in which not all `keys` find room, and say which keys find room after that.

    Victims are rows not met in this step, least (last step, key) first or, by count, least (count, last step, key): as
    many as needed and 1 / SPARE of the slot's share besides. Of the keys of a slot the least find room.

    Args:
        keys: different keys without rows, sorted by slot and key.
        victims: scratch for three numbers of each key and of each row of 1 / SPARE of a share, and of one more.

    Returns:
        How many rows were removed.
    """
    removed: Integer = 0
    begin = 0
    while begin < keys.size:
        slot = np.int64(hash_key(keys[begin]) >> SLOT_SHIFT) - index.first_slot
        end = begin + 1
        while end < keys.size and np.int64(hash_key(keys[end]) >> SLOT_SHIFT) - index.first_slot == slot:
            end += 1
        share = share_of(slot + index.first_slot, max_rows)
        room = share - index.counts[slot]
        if room < end - begin:
            most = end - begin - room + share // SPARE
            found = _first_victims(index, notes, slot, step, by_count, victims, most)
            for i in range(found):
                remove(index, aside, slot, entry_of(index, victims[3 * i + 2]))
            room += found
            removed += found
        for i in range(begin, end):
            is_kept[i] = i - begin < room
        begin = end
    return removed
