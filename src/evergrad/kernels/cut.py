"""Handing out what a cut of a table shows, slot by slot and in order of keys, and taking it to restore a table."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Integers, Keys, Rows
from evergrad.kernels.aside import (
    ASIDE,
    CANDIDATE,
    LIMIT,
    MOST,
    MOST_ROWS,
    STEP,
    STRIDE,
    WIDTH,
    Aside,
    chunk_of,
    is_seen,
)
from evergrad.kernels.entry import EMPTY, MOST_COUNT, Integer, as_candidate, count_of, last_of
from evergrad.kernels.hashing import SLOT_SHIFT, hash_key
from evergrad.kernels.index import INDEX, NOT_OURS, Index, entry_of, has_room, settle, span_of
from evergrad.kernels.jit import f32, flag, i32, i64, inline, kernel, prefetch, reads, record, void, writes
from evergrad.kernels.lanes import prefetch_row

Notes = NDArray[np.int32]
Counts = NDArray[np.int32]

WRONG = -2
"""As a count: the slots hold more than there is room for, or a candidate has an entry already."""
_AHEAD = 48
_DIGITS, _VALUES = 8, 256
_FEW = 24


class Listed(NamedTuple):
    """The entries of some slots, sorted, and scratch to sort those of one."""

    keys: Integers
    whats: Integers
    """The number of a row, -1 - the word of its record, or what stands for a candidate."""
    other_keys: Integers
    other_whats: Integers
    counts: Counts


LISTED = record(Listed, writes(i64), writes(i64), writes(i64), writes(i64), writes(i32))


def room_for(entries: int, of_a_slot: int) -> Listed:
    """Room for so many entries of some slots, of which so many may be of one."""
    keys, whats = np.empty((2, entries + 1), np.int64)
    other_keys, other_whats = np.empty((2, of_a_slot), np.int64)
    return Listed(keys, whats, other_keys, other_whats, np.empty(_DIGITS * _VALUES, np.int32))


@inline
def _digit(key: np.int64, digit: Integer) -> Integer:
    value: Integer = (key >> (8 * digit)) & (_VALUES - 1)
    return value ^ (_VALUES >> 1) if digit == _DIGITS - 1 else value


@inline
def _insert_into_place(listed: Listed, begin: Integer, end: Integer) -> None:
    keys, whats = listed.keys, listed.whats
    for i in range(begin + 1, end):
        key, what = keys[i], whats[i]
        to = i
        while to > begin and keys[to - 1] > key:
            keys[to] = keys[to - 1]
            whats[to] = whats[to - 1]
            to -= 1
        keys[to] = key
        whats[to] = what


@inline
def _move_by_digit(
    digit: Integer, counts: Counts, keys: Integers, whats: Integers, to_keys: Integers, to_whats: Integers,
    begin: Integer, end: Integer, to_begin: Integer,
) -> None:  # fmt: skip
    place: Integer = to_begin
    for value in range(digit * _VALUES, (digit + 1) * _VALUES):
        place, counts[value] = place + counts[value], place
    for i in range(begin, end):
        of_key = digit * _VALUES + _digit(keys[i], digit)
        to = counts[of_key]
        counts[of_key] = to + 1
        to_keys[to] = keys[i]
        to_whats[to] = whats[i]


@inline
def _sort(listed: Listed, begin: Integer, end: Integer) -> None:
    """Sort a slot's entries by key: by one digit after the other, those left out in which all are the same."""
    count = end - begin
    if count <= _FEW:
        _insert_into_place(listed, begin, end)
        return
    keys, whats, other_keys, other_whats, counts = listed
    for i in range(counts.size):
        counts[i] = 0
    for i in range(begin, end):
        for digit in range(_DIGITS):
            counts[digit * _VALUES + _digit(keys[i], digit)] += 1
    is_moved = False
    for digit in range(_DIGITS):
        if counts[digit * _VALUES + _digit(keys[begin], digit)] == count:
            continue
        if is_moved:
            _move_by_digit(digit, counts, other_keys, other_whats, keys, whats, 0, count, begin)
        else:
            _move_by_digit(digit, counts, keys, whats, other_keys, other_whats, begin, end, 0)
        is_moved = not is_moved
    if is_moved:
        for i in range(count):
            keys[begin + i] = other_keys[i]
            whats[begin + i] = other_whats[i]


@inline
def _is_shown(aside: Aside, what: Integer, is_candidate: bool) -> bool:
    """Whether what stands in an entry belongs to the cut as it is, and is a candidate or is not."""
    if is_candidate:
        return bool(what < EMPTY and last_of(what) <= aside.state[STEP])
    return bool(0 <= what < aside.state[LIMIT] and not is_seen(aside, what))


@inline
def _prefetch_chunk(aside: Aside, chunk: Integer, width: Integer, most: Integer) -> None:
    for i in range(most):
        prefetch(aside.words, chunk + 1 + i * width)


@kernel(i64, INDEX, ASIDE, i64, i64, flag, LISTED)
def list_entries(index: Index, aside: Aside, begin: int, end: int, is_candidate: bool, listed: Listed) -> Integer:
    """List the rows, or the candidates, that the cut shows in the slots from `begin` up to `end`, by (slot, key).

    Returns:
        How many, or WRONG.
    """
    count: Integer = 0
    width = CANDIDATE if is_candidate else aside.state[WIDTH]
    most = MOST if is_candidate else aside.state[MOST_ROWS]
    heads = aside.candidate_heads if is_candidate else aside.heads
    for slot in range(begin, end):
        first = count
        if slot + 1 < end:
            _prefetch_chunk(aside, chunk_of(heads[slot + 1])[0], width, most)
        start, stop = span_of(index, slot)
        for at in range(start, stop):
            if count == listed.keys.size:
                return WRONG
            # written in any case, since there is nothing to tell which way a branch would go
            listed.keys[count] = index.entries[2 * at]
            listed.whats[count] = index.entries[2 * at + 1]
            count += _is_shown(aside, index.entries[2 * at + 1], is_candidate)
        head = heads[slot]
        chunk, used = chunk_of(head)
        while head >= 0:
            head = aside.words[chunk]
            _prefetch_chunk(aside, head, width, most)
            for i in range(used):
                if count == listed.keys.size:
                    return WRONG
                record = chunk + 1 + i * width
                listed.keys[count] = aside.words[record]
                listed.whats[count] = aside.words[record + 1] if is_candidate else -1 - record
                count += 1
            chunk, used = head, most
        if count - first > listed.other_keys.size:
            return WRONG
        _sort(listed, first, count)
    return count


@inline
def _prefetch_row(aside: Aside, what: Integer) -> None:
    stride = aside.state[STRIDE]
    if what >= 0:
        prefetch_row(aside.rows, what * stride, stride, stride)
        prefetch(aside.notes, 2 * what)
    else:
        prefetch_row(aside.floats, 2 * -what, stride, stride)


@kernel(void, ASIDE, reads(i64), writes(f32), writes(i32))
def copy_rows(aside: Aside, whats: Rows, rows: Floats, notes: Notes) -> None:
    """Copy these rows, from the arena or from where they were copied aside, and their notes if `notes` is not empty."""
    stride, n = aside.state[STRIDE], whats.size
    for i in range(min(_AHEAD, n)):
        _prefetch_row(aside, whats[i])
    for i in range(n):
        if i + _AHEAD < n:
            _prefetch_row(aside, whats[i + _AHEAD])
        what = whats[i]
        to = rows[i * stride : (i + 1) * stride]
        if what >= 0:
            value = aside.rows[what * stride : (what + 1) * stride]
            for c in range(stride):
                to[c] = value[c]
            if notes.size:
                notes[2 * i] = aside.notes[2 * what]
                notes[2 * i + 1] = aside.notes[2 * what + 1]
        else:
            at = -1 - what
            copy = aside.floats[2 * (at + 1) : 2 * (at + 1) + stride]
            for c in range(stride):
                to[c] = copy[c]
            if notes.size:
                note = aside.words[at + aside.state[WIDTH] - 1]
                notes[2 * i] = note & MOST_COUNT
                notes[2 * i + 1] = note >> 31


@kernel(void, reads(i64), writes(i32))
def copy_notes(candidates: Integers, notes: Notes) -> None:
    """The notes of candidates."""
    for i in range(candidates.size):
        notes[2 * i] = last_of(candidates[i])
        notes[2 * i + 1] = count_of(candidates[i])


@kernel(i64, INDEX, reads(i64), reads(i32), i64)
def take_candidates(index: Index, keys: Keys, notes: Notes, begin: int) -> int:
    """Make entries for candidates from `keys[begin]` on; returns how many are done.

    Fewer than there are where the entries do not suffice; NOT_OURS for a key of another pserver, WRONG for one that has
    an entry.
    """
    for i in range(begin, keys.size):
        slot = np.int64(hash_key(keys[i]) >> SLOT_SHIFT) - index.first_slot
        if slot < 0 or slot >= index.regions.size:
            return NOT_OURS
        if entry_of(index, keys[i]) >= 0:
            return WRONG
        if not has_room(index, slot):
            return i
        settle(index, slot, keys[i], as_candidate(np.int64(notes[2 * i]), np.int64(notes[2 * i + 1])))
    return keys.size


@kernel(void, writes(f32), writes(i32), i64, reads(i64), reads(f32, 2), reads(i32))
def take_rows(arena: Floats, notes: Notes, stride: int, rows: Rows, values: Floats, given: Notes) -> None:
    """Write whole rows, and their notes where there are any."""
    for i in range(rows.size):
        to, value = arena[rows[i] * stride : (rows[i] + 1) * stride], values[i]
        for c in range(stride):
            to[c] = value[c]
        if given.size:
            notes[2 * rows[i]] = given[2 * i]
            notes[2 * rows[i] + 1] = given[2 * i + 1]
