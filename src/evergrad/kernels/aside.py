"""Copying aside what a cut of a table shows before it changes.

A cut shows the rows and candidates of one moment; they are handed out later, slot by slot (`kernels/cut.py`). Of a slot
not handed out yet, a row is copied aside before it is changed or deleted, once; and a candidate before it is counted,
forgotten or given a row.

Invariants, while a cut is under way:
    1. A row of a slot not handed out belongs to the cut, as it is in the arena, if its number is below LIMIT and not
       seen. It is seen once it is copied aside, and so is a number that is given to a new row.
    2. A candidate of such a slot belongs to the cut, as it is in its entry, if it was last met in step STEP or before.
    3. All else that belongs to the cut stands in the slot's records, each once.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Integers, Keys, Rows
from evergrad.kernels.entry import EMPTY, Integer, last_of
from evergrad.kernels.hashing import SLOT_SHIFT, hash_key
from evergrad.kernels.jit import f32, i32, i64, inline, kernel, prefetch, reads, record, u8, void, writes
from evergrad.kernels.lanes import prefetch_row

FROM, LIMIT, STEP, STRIDE, WIDTH, MOST_ROWS, TOP = range(7)
"""Of `Aside.state`: the first slot not handed out, counted from the first of the index; one more than the greatest
number of a row at the cut; the table's updates at the cut; floats of a row; words of its record and records of a chunk;
the end of the used part of the words."""
MOST = 7
"""Records of a chunk at most."""
CHUNK_WORDS = 128
"""About how large a chunk is at most, unless one record is larger; the rest of each slot's newest chunk is wasted."""
CANDIDATE = 2
_USED_BITS = 3
_AHEAD = 32


class Aside(NamedTuple):
    """What kernels see of a cut and of its table's rows.

    What is copied aside of a slot lies in records, a few to a chunk: first the word of the slot's chunk before or -1,
    then the records. One of a row is its key, its floats, two to a word, and its note as `as_word` makes it, where the
    table keeps notes; one of a candidate is its key and what stood in its entry.
    """

    state: Integers
    seen: NDArray[np.uint8]
    """A bit for each row below LIMIT."""
    heads: Integers
    """For each slot the newest chunk of rows, and how many of its records are used, packed; or -1."""
    candidate_heads: Integers
    """The same of candidates."""
    words: Integers
    floats: Floats
    """The memory of `words` once more."""
    rows: Floats
    """The table's arena."""
    notes: NDArray[np.int32]
    """Those of the table, empty where it keeps none."""


ASIDE = record(
    Aside, writes(i64), writes(u8), writes(i64), writes(i64), writes(i64), writes(f32), writes(f32), writes(i32)
)


def state_of(limit: int, step: int, stride: int, has_notes: bool) -> Integers:
    """The state at the beginning of a cut."""
    width = 1 + (stride + 1) // 2 + has_notes
    return np.array([0, limit, step, stride, width, min(max(CHUNK_WORDS // width, 1), MOST), 0], np.int64)


def no_aside() -> Aside:
    """For a table without a cut under way: nothing belongs to it."""
    integers, floats = np.empty(0, np.int64), np.empty(0, np.float32)
    return Aside(
        state_of(0, -1, 0, False), np.empty(0, np.uint8), integers, integers, integers, floats, floats,
        np.empty(0, np.int32),
    )  # fmt: skip


def words_needed(state: Integers, rows: Integers, candidates: Integers) -> int:
    """How many words it takes at most to copy so many rows and candidates of each slot aside."""
    width, most = int(state[WIDTH]), int(state[MOST_ROWS])
    chunks, candidate_chunks = -(-rows // most), -(-candidates // MOST)
    return int(chunks.sum()) * (1 + most * width) + int(candidate_chunks.sum()) * (1 + MOST * CANDIDATE)


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
    """The word of a slot's newest chunk and how many of its records are used."""
    return head >> _USED_BITS, head & ((1 << _USED_BITS) - 1)


@inline
def _new_record(aside: Aside, heads: Integers, slot: Integer, width: Integer, most: Integer) -> Integer:
    """Where to write another record of a slot."""
    at, used = chunk_of(heads[slot])
    if heads[slot] < 0 or used == most:
        before = at if heads[slot] >= 0 else -1
        at, used = aside.state[TOP], 0
        aside.state[TOP] = at + 1 + most * width
        aside.words[at] = before
    heads[slot] = (at << _USED_BITS) | (used + 1)
    return at + 1 + used * width


@inline
def _keep_row(aside: Aside, slot: Integer, key: np.int64, row: Integer) -> None:
    stride = aside.state[STRIDE]
    at = _new_record(aside, aside.heads, slot, aside.state[WIDTH], aside.state[MOST_ROWS])
    aside.words[at] = key
    to = 2 * (at + 1)
    copy, value = aside.floats[to : to + stride], aside.rows[row * stride : (row + 1) * stride]
    for c in range(stride):
        copy[c] = value[c]
    if aside.notes.size:
        note = as_word(np.int64(aside.notes[2 * row]), np.int64(aside.notes[2 * row + 1]))
        aside.words[at + aside.state[WIDTH] - 1] = note
    see(aside, row)


@inline
def _keep_candidate(aside: Aside, slot: Integer, key: np.int64, candidate: Integer) -> None:
    at = _new_record(aside, aside.candidate_heads, slot, CANDIDATE, MOST)
    aside.words[at] = key
    aside.words[at + 1] = candidate


@inline
def keep_entry(aside: Aside, slot: Integer, key: np.int64, row: Integer) -> None:
    """Copy aside what an entry of this slot stands for, if it belongs to the cut; `row` is the entry's second half."""
    if slot < aside.state[FROM]:
        return
    if row >= 0:
        if row < aside.state[LIMIT] and not is_seen(aside, row):
            _keep_row(aside, slot, key, row)
    elif row != EMPTY and last_of(row) <= aside.state[STEP]:
        _keep_candidate(aside, slot, key, row)


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
            prefetch_row(aside.rows, row * stride, stride, stride)
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
