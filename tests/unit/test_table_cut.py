"""A cut of a table shows one moment, changes nothing, and loading it makes the same table again."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad import init_rows
from evergrad.checkpoint.pieces import RowsPiece
from evergrad.errors import CheckpointError, InvariantError
from evergrad.kernels.entry import EMPTY, count_of, last_of
from evergrad.kernels.hashing import slots_of
from evergrad.kernels.index import span_of
from evergrad.messages import TableSpec
from evergrad.optim import SGD, Adagrad, Adam, RowWiseAdagrad
from evergrad.placement import SLOTS, slots_owned
from evergrad.pserver.table import Table

ALL = range(SLOTS)
PIECE, SLICE = 1 << 20, 1 << 16


def ids(*keys):
    return np.array(keys, np.int64)


def table_spec(rule=None, dim=3, **policy):
    return TableSpec("user", dim, (rule or Adagrad()).spec(), init_rows.normal(), **policy)


def push(table, keys, seed=0):
    grads = np.random.default_rng(seed).standard_normal((keys.size, table._spec.dim)).astype(np.float32)
    table.update([(keys, grads, 1)], 1, 0.1)


def content(table):
    """All that a checkpoint must hold of a table: rows and candidates by key, each with its note if it has one."""
    rows, candidates = {}, {}
    at, stride, has_notes = table._index, table._stride, table._policy.has_notes
    for slot in np.flatnonzero(at.used).tolist():
        for entry in range(*span_of(at, slot)):
            key, row = at.entries[2 * entry : 2 * entry + 2].tolist()
            if row >= 0:
                note = tuple(table._notes.array[2 * row : 2 * row + 2].tolist()) if has_notes else None
                rows[key] = (table._rows.array[row * stride : (row + 1) * stride].tobytes(), note)
            elif row != EMPTY:
                candidates[key] = (last_of(row), count_of(row))
    return rows, candidates, table.updates


def piece_content(pieces):
    """The same of pieces, which must be in order and cover each slot once."""
    rows, candidates = {}, {}
    for piece in pieces:
        assert_sorted(piece.keys, piece.slots)
        assert_sorted(piece.candidates, piece.slots)
        notes = [None] * piece.keys.size if piece.notes is None else [tuple(n) for n in piece.notes.tolist()]
        new = {k: (r.tobytes(), n) for k, r, n in zip(piece.keys.tolist(), piece.rows, notes, strict=True)}
        assert not new.keys() & rows.keys()
        rows |= new
        candidates |= dict(zip(piece.candidates.tolist(), map(tuple, piece.candidate_notes.tolist()), strict=True))
    return rows, candidates


def assert_sorted(keys, slots):
    of_keys = slots_of(keys)
    assert all(slot in slots for slot in of_keys.tolist())
    assert (np.lexsort((keys, of_keys)) == np.arange(keys.size)).all()


def finish(table, piece_bytes=PIECE, slice_bytes=SLICE):
    """All pieces that are still to come of a cut under way."""
    pieces, is_last = [], False
    while not is_last:
        piece, is_last = table.advance_cut(piece_bytes, slice_bytes)
        pieces += [piece] if piece else []
    return pieces


def cut_whole(table):
    table.begin_cut(0)
    pieces = finish(table)
    table.end_cut()
    return pieces


def keys_of_one_slot(count, start=0):
    keys = np.arange(start, start + 20_000 * count)
    slots = slots_of(keys)
    return keys[slots == slots[0]][:count].tolist()


CROWDED = [*keys_of_one_slot(8), *keys_of_one_slot(8, 10**9)]
KEYS = [*range(60), *CROWDED, -(2**63), 2**63 - 1, -1, -2, -(2**62), 2**62]
A_KEY = st.sampled_from(KEYS)
POLICIES = st.fixed_dictionaries(
    {
        "min_count": st.integers(1, 3),
        "ttl": st.sampled_from([None, None, 0, 1, 3]),
        "max_rows": st.sampled_from([None, None, SLOTS, 3 * SLOTS]),
        "evict": st.sampled_from(["recent", "count"]),
    }
)
RULES = st.sampled_from([SGD(), Adagrad(), Adam(), RowWiseAdagrad()])
SOME_KEYS = st.lists(A_KEY, max_size=25)
EVENT = st.one_of(
    st.tuples(st.just("push"), SOME_KEYS),
    st.tuples(st.just("push"), SOME_KEYS),
    st.tuples(st.just("evict"), SOME_KEYS),
    st.tuples(st.just("pull"), SOME_KEYS),
    st.tuples(st.just("slice"), st.sampled_from([1, 200, 1000])),
    st.tuples(st.just("slice"), st.sampled_from([1, 200, 1000])),
    st.tuples(st.just("cut"), st.none()),
    st.tuples(st.just("abandon"), st.none()),
)


class Watched:
    """A table, another to which the same is done but no cut, and what the cut under way must show."""

    def __init__(self, spec, slots):
        self.table, self.plain = Table(spec, 0, slots), Table(spec, 0, slots)
        self.is_cut, self.expected, self.pieces = False, None, []

    def act(self, kind, argument, seed):
        match kind:
            case "push":
                for table in (self.table, self.plain):
                    push(table, ids(*argument), seed)
            case "evict":
                assert self.table.evict(ids(*argument)) == self.plain.evict(ids(*argument))
            case "pull":
                pulled = [t.pull(ids(*argument), False).tobytes() for t in (self.table, self.plain)]
                assert pulled[0] == pulled[1]
            case "cut" if not self.is_cut:
                self.table.begin_cut(0)
                self.is_cut, self.expected, self.pieces = True, copy.deepcopy(content(self.table)), []
            case "slice" if self.is_cut:
                piece, is_last = self.table.advance_cut(4 * argument, argument)
                self.pieces += [piece] if piece else []
                if is_last:
                    self.judge()
            case "abandon":
                self.table.end_cut()
                self.is_cut = False

    def judge(self):
        covered = [slot for piece in self.pieces for slot in piece.slots]
        assert covered == list(self.table._slots)
        assert piece_content(self.pieces) == self.expected[:2]
        self.table.end_cut()
        self.is_cut = False

    def end(self):
        assert content(self.table) == content(self.plain)
        if self.is_cut:
            self.pieces += finish(self.table)
            self.judge()
        assert content(self.table) == content(self.plain)


@settings(deadline=None, max_examples=250)
@given(POLICIES, RULES, st.lists(EVENT, min_size=3, max_size=40), st.sampled_from([0, 1, 2]))
def test_a_cut_shows_the_table_as_it_was_and_leaves_it_as_it_would_be_without(policy, rule, events, place):
    watched = Watched(table_spec(rule, 2, **policy), slots_owned(place, 3))
    owned = slots_owned(place, 3)
    for seed, (kind, argument) in enumerate(events):
        if kind == "push":
            argument = [key for key in argument if slots_of(ids(key))[0] in owned]
        watched.act(kind, argument, seed)
    watched.end()


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"min_count": 2},
        {"ttl": 4},
        {"max_rows": SLOTS // 4, "evict": "count"},
        {"min_count": 2, "ttl": 2, "max_rows": 9000},
    ],
)
def test_cuts_one_after_the_other_show_large_tables_whose_rows_come_and_go(policy):
    rng = np.random.default_rng(1)
    watched = Watched(table_spec(dim=5, **policy), ALL)
    for seed in range(60):
        watched.act("push", rng.integers(0, 30_000, 3000).tolist(), seed)
        if seed % 3 == 0:
            watched.act("evict", rng.integers(0, 30_000, 500).tolist(), seed)
        if seed % 12 == 2:
            watched.act("cut", None, seed)
        for _ in range(6):
            watched.act("slice", 30_000, seed)
    watched.end()


def test_what_is_made_after_a_cut_does_not_appear_and_what_is_deleted_does():
    table = Table(table_spec(SGD()), 0, ALL)
    push(table, ids(1, 2, 3))
    before = content(table)
    table.begin_cut(0)
    table.evict(ids(1, 2))
    push(table, ids(2, 4, 5))  # two of them in the places of those deleted
    table.evict(ids(4))
    push(table, ids(4))
    assert piece_content(finish(table)) == before[:2]


def test_a_candidate_counted_forgotten_or_promoted_after_a_cut_appears_as_it_was():
    table = Table(table_spec(min_count=2, ttl=20), 0, ALL)
    push(table, ids(1, 2, 3))
    before = content(table)
    table.begin_cut(0)
    push(table, ids(1, 4))
    table.evict(ids(2, 2, 4))
    push(table, ids(2))
    for _ in range(40):
        push(table, ids())
    assert content(table)[:2] == ({}, {})
    assert piece_content(finish(table)) == (before[0], before[1])


def test_a_row_is_copied_aside_once_and_not_at_all_when_it_is_handed_out():
    table = Table(table_spec(), 0, ALL)
    keys = np.arange(10_000)
    push(table, keys)
    table.begin_cut(0)
    push(table, keys[:100])
    once = table._cut.kept_bytes
    assert 0 < once <= 100 * 1024
    push(table, keys[:100])
    assert table._cut.kept_bytes == once
    table.advance_cut(PIECE, PIECE)
    assert table._cut.is_handed_out
    push(table, keys)
    assert table._cut.kept_bytes == once


def test_beginning_a_cut_touches_nothing_that_grows_with_the_table():
    small, large = Table(table_spec(), 0, ALL), Table(table_spec(), 0, ALL)
    push(small, np.arange(10))
    push(large, np.arange(300_000))
    for table in (small, large):
        table.begin_cut(0)
    own = [[a.nbytes for a in (t._cut._rows_of, t._cut._candidates_of, t._cut._ends_bytes)] for t in (small, large)]
    assert own[0] == own[1]
    assert large._cut.kept_bytes == 0


def test_a_table_without_rows_is_one_piece_that_covers_its_slots():
    table = Table(table_spec(min_count=2), 0, range(100, 300))
    table.update([], 1, 0.1)
    (piece,) = cut_whole(table)
    assert piece.slots == range(100, 300)
    assert piece.rows.shape == (0, 6)


def test_pieces_are_of_whole_slots_and_of_about_the_bytes_asked():
    table = Table(table_spec(), 0, ALL)
    push(table, np.arange(100_000))
    table.begin_cut(7)
    pieces = finish(table, 100_000, 10_000)
    assert {piece.table for piece in pieces} == {7}
    sizes = [piece.keys.nbytes + piece.rows.nbytes for piece in pieces]
    assert all(90_000 < size <= 100_000 for size in sizes[:-1])


# -- loading -----------------------------------------------------------------------------------------------------------


def part_of(piece, slots):
    """What of a piece falls into these slots, in another order."""
    here = range(max(piece.slots.start, slots.start), min(piece.slots.stop, slots.stop))
    rng = np.random.default_rng(3)
    picked = []
    for keys in (piece.keys, piece.candidates):
        of_keys = slots_of(keys)
        picked.append(rng.permutation(np.flatnonzero((of_keys >= here.start) & (of_keys < here.stop))))
    rows, candidates = picked
    notes = None if piece.notes is None else piece.notes[rows]
    return RowsPiece(
        0, here, piece.keys[rows], piece.rows[rows], notes,
        piece.candidates[candidates], piece.candidate_notes[candidates],
    )  # fmt: skip


def restored(spec, pieces, updates, places):
    tables = []
    for place in range(places):
        slots = slots_owned(place, places)
        table = Table(spec, 0, slots)
        table.set_updates(updates)
        for piece in reversed(pieces):
            if (part := part_of(piece, slots)).slots:
                table.load(part)
        tables.append(table)
    return tables


@pytest.mark.parametrize("places", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "policy", [{}, {"min_count": 3}, {"min_count": 2, "ttl": 5}, {"max_rows": 3000, "ttl": 9, "evict": "count"}]
)
@pytest.mark.parametrize("rule", [Adam(), RowWiseAdagrad(lr_decay=0.1)], ids=repr)
def test_a_table_restored_on_any_number_of_pservers_goes_on_with_the_same_bits(places, policy, rule):
    spec, rng = table_spec(rule, 4, **policy), np.random.default_rng(0)
    table = Table(spec, 0, ALL)
    for seed in range(20):
        push(table, rng.integers(-3000, 3000, 700), seed)
    tables = restored(spec, cut_whole(table), table.updates, places)
    for _ in range(20):
        keys = np.unique(rng.integers(-3000, 3000, 700))
        grads = rng.standard_normal((keys.size, 4)).astype(np.float32)
        table.update([(keys, grads, 1)], 1, 0.1)
        of_keys = slots_of(keys)
        for place, part in enumerate(tables):
            owned = slots_owned(place, places)
            here = (of_keys >= owned.start) & (of_keys < owned.stop)
            part.update([(keys[here], grads[here], 1)], 1, 0.1)
    rows, candidates = {}, {}
    for part in tables:
        some_rows, some_candidates, updates = content(part)
        assert updates == 40
        rows |= some_rows
        candidates |= some_candidates
    assert (rows, candidates) == content(table)[:2]


def test_a_restored_table_can_be_cut_and_shows_the_same_again():
    table = Table(table_spec(min_count=2, ttl=50), 0, ALL)
    for seed in range(4):
        push(table, np.random.default_rng(seed).integers(0, 4000, 3000), seed)
    pieces = cut_whole(table)
    (again,) = restored(table._spec, pieces, table.updates, 1)
    assert piece_content(cut_whole(again)) == piece_content(pieces)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": np.zeros((2, 7), np.float32)},
        {"rows": np.zeros((3, 6), np.float32)},
        {"keys": ids(5, 5)},
        {"notes": None},
        {"candidates": ids(6), "candidate_notes": np.zeros((1, 2), np.int32)},
    ],
)
def test_a_piece_that_does_not_fit_is_an_error(wrong):
    table = Table(table_spec(ttl=3, min_count=2), 0, ALL)
    piece = RowsPiece(
        0, ALL, ids(5, 6), np.zeros((2, 6), np.float32), np.zeros((2, 2), np.int32), ids(), np.zeros((0, 2), np.int32)
    )
    with pytest.raises(CheckpointError, match="'user'"):
        table.load(piece._replace(**wrong))


def test_a_slot_of_hundreds_of_rows_is_handed_out_in_the_order_of_its_keys():
    slots = range(40, 43)
    rng = np.random.default_rng(0)
    for keys in (rng.integers(-(2**63), 2**63, 4_000_000, np.int64), np.arange(-2_000_000, 2_000_000)):
        here = keys[np.isin(slots_of(keys), slots)]
        table = Table(table_spec(min_count=2), 0, slots)
        push(table, here[: here.size // 2])
        push(table, here)
        expected = content(table)[:2]
        table.begin_cut(0)
        push(table, here[::3].copy())
        assert piece_content(finish(table)) == expected
        assert min(len(found) for found in expected) > 50 * len(slots)


def test_a_key_of_another_pserver_is_not_loaded():
    table = Table(table_spec(min_count=2), 0, range(int(slots_of(ids(1))[0])))
    row, note = np.zeros((1, 6), np.float32), np.ones((1, 2), np.int32)
    for piece in (
        RowsPiece(0, table._slots, ids(1), row, None, ids(), note[:0]),
        RowsPiece(0, table._slots, ids(), row[:0], None, ids(1), note),
    ):
        with pytest.raises(InvariantError, match="'user'"):
            table.load(piece)
