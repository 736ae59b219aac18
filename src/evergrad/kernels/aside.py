"""Copying aside what a cut of a table shows before it changes.

A cut shows the rows and candidates of one moment; they are handed out later, slot by slot (`kernels/cut.py`). Of a slot
not handed out yet, a row is copied aside before it is changed or deleted, once; and a candidate before it is counted,
forgotten or given a row.

Invariants, while a cut is under way:
    1. A row of a slot not handed out belongs to the cut, as it is in the arena, if its number is below LIMIT and not
       seen. It is seen once it is copied aside, and so is a number that is given to a new row.
    2. A candidate of such a slot belongs to the cut, as it is in its entry, if it was last met in step STEP or before.
    3. All else that belongs to the cut stands in the slot's list, each once.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Integers, Keys, Rows
from evergrad.kernels.entry import EMPTY, Integer, last_of
from evergrad.kernels.hashing import SLOT_SHIFT, hash_key
from evergrad.kernels.jit import f32, i32, i64, inline, kernel, prefetch, reads, record, u8, void, writes

FROM, LIMIT, STEP, STRIDE, TOP = range(5)
"""Of `Aside.state`: the first slot not handed out, counted from the first of the index; one more than the greatest
number of a row at the cut; the table's updates at the cut; floats of a row; the end of the used part of the words."""
CHUNK, IN_CHUNK = 16, 7
"""Words of a chunk of a slot's list, two cache lines: up to seven pairs (key, what), then the word of the next chunk,
of which all pairs are used, or -1. `what` is what stood in a candidate's entry, and for a row the word of its copy:
its floats, two to a word, and its note as `as_word` makes it, where the table keeps notes."""
_USED_BITS = 3
_AHEAD = 32
_LINE = 16


class Aside(NamedTuple):
    """What kernels see of a cut and of its table's rows."""

    state: Integers
    seen: NDArray[np.uint8]
    """A bit for each row below LIMIT."""
    heads: Integers
    """For each slot the word of its newest chunk and how many pairs of that are used, packed; or -1."""
    words: Integers
    floats: Floats
    """The memory of `words` once more."""
    rows: Floats
    """The table's arena."""
    notes: NDArray[np.int32]
    """Those of the table, empty where it keeps none."""


ASIDE = record(Aside, writes(i64), writes(u8), writes(i64), writes(i64), writes(f32), writes(f32), writes(i32))


def no_aside() -> Aside:
    """For a table without a cut under way: nothing belongs to it."""
    state = np.array([0, 0, -1, 0, 0], np.int64)
    integers, floats = np.empty(0, np.int64), np.empty(0, np.float32)
    return Aside(state, np.empty(0, np.uint8), integers, integers, floats, floats, np.empty(0, np.int32))


def words_needed(rows: Integers, candidates: Integers, stride: int, has_notes: bool) -> int:
    """How many words at most it takes to copy so many rows and candidates of each slot aside."""
    chunks = -(-(rows + candidates) // IN_CHUNK)
    return int(rows.sum()) * ((stride + 1) // 2 + has_notes) + int(chunks.sum()) * CHUNK


@inline
def as_word(last: Integer, count: Integer) -> Integer:
    """A row's note in one word; not negative."""
    return (count << 31) | last


@inline
def is_seen(aside: Aside, row: Integer) -> bool:
    """Whether a row below LIMIT is no longer what the cut shows."""
    return bool(aside.seen[row >> 3] & (1 << (row & 7)))


@inline
def see(aside: Aside, row: Integer) -> None:
    """From now on it is not."""
    aside.seen[row >> 3] |= np.uint8(1 << (row & 7))


@inline
def chunk_of(head: Integer) -> tuple[Integer, Integer]:
    """The word of a slot's newest chunk and how many pairs are used there."""
    return head >> _USED_BITS, head & ((1 << _USED_BITS) - 1)


@inline
def _list(aside: Aside, slot: Integer, key: np.int64, what: Integer) -> None:
    head = aside.heads[slot]
    at, used = chunk_of(head)
    if head < 0 or used == IN_CHUNK:
        following = at if head >= 0 else -1
        at, used = aside.state[TOP], 0
        aside.state[TOP] = at + CHUNK
        aside.words[at + 2 * IN_CHUNK] = following
    aside.words[at + 2 * used] = key
    aside.words[at + 2 * used + 1] = what
    aside.heads[slot] = (at << _USED_BITS) | (used + 1)


@inline
def _keep_row(aside: Aside, slot: Integer, key: np.int64, row: Integer) -> None:
    stride = aside.state[STRIDE]
    at = aside.state[TOP]
    size = (stride + 1) >> 1
    if aside.notes.size:
        aside.words[at + size] = as_word(np.int64(aside.notes[2 * row]), np.int64(aside.notes[2 * row + 1]))
    aside.state[TOP] = at + size + (aside.notes.size > 0)
    copy, value = aside.floats[2 * at : 2 * at + stride], aside.rows[row * stride : (row + 1) * stride]
    for c in range(stride):
        copy[c] = value[c]
    _list(aside, slot, key, at)
    see(aside, row)


@inline
def keep_entry(aside: Aside, slot: Integer, key: np.int64, row: Integer) -> None:
    """Copy aside what an entry of this slot stands for, if it belongs to the cut; `row` is the entry's second half."""
    if slot < aside.state[FROM]:
        return
    if row >= 0:
        if row < aside.state[LIMIT] and not is_seen(aside, row):
            _keep_row(aside, slot, key, row)
    elif row != EMPTY and last_of(row) <= aside.state[STEP]:
        _list(aside, slot, key, row)


@kernel(i64, ASIDE, reads(i64), writes(i64))
def find_unseen(aside: Aside, rows: Rows, found: Integers) -> int:
    """Write to `found` which of `rows` may have to be copied aside; returns how many. Most are seen after a while."""
    limit, count = np.uint64(aside.state[LIMIT]), 0
    for i in range(rows.size):
        row = rows[i]
        is_row = np.uint64(row) < limit
        # without a branch, of which nobody could tell which way it goes
        is_new = is_row & (not is_seen(aside, row if is_row else 0))
        found[count] = i
        count += is_new | (row < EMPTY)
    return count


@kernel(void, ASIDE, i64, reads(i64), reads(i64), reads(i64))
def keep(aside: Aside, first_slot: int, keys: Keys, rows: Rows, which: Integers) -> None:
    """Copy the rows and candidates `rows[which]` of these keys aside, as far as they belong to the cut.

    A row that stands here twice is allowed, a candidate that does is not.
    """
    stride, n = aside.state[STRIDE], which.size
    for j in range(n):
        if j + _AHEAD < n:
            row = rows[which[j + _AHEAD]]
            for at in range(0, stride, _LINE):
                prefetch(aside.rows, row * stride + at)
            prefetch(aside.notes, 2 * row)
        key, row = keys[which[j]], rows[which[j]]
        slot = np.int64(hash_key(key) >> SLOT_SHIFT) - first_slot
        keep_entry(aside, slot, key, row)
        if row >= 0:
            see(aside, row)  # in a slot handed out too: there is no need to look at it again


@kernel(void, ASIDE, reads(i64))
def note_new(aside: Aside, rows: Rows) -> None:
    """These numbers are given to rows that the cut does not show."""
    for i in range(rows.size):
        if rows[i] < aside.state[LIMIT]:
            see(aside, rows[i])
