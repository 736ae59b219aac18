"""Deletion and policy of a table, against rules written plainly over dictionaries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad import init_rows
from evergrad.errors import InvariantError
from evergrad.kernels.hashing import slots_of
from evergrad.messages import ExportPart, TableSpec
from evergrad.optim import SGD, Adagrad
from evergrad.placement import SLOTS, slots_owned
from evergrad.pserver.policy import CANDIDATE_TTL, LONGEST_PERIOD, policy_of
from evergrad.pserver.table import Table

ALL = range(SLOTS)
INITIAL = 1.5


def ids(*keys):
    return np.array(keys, np.int64)


def table_spec(**policy):
    return TableSpec("user", 2, SGD().spec(), init_rows.constant(INITIAL), **policy)


def new_table(slots=ALL, **policy):
    return Table(table_spec(**policy), 0, slots)


def push(table, *keys, grad=1.0):
    table.update([(ids(*keys), np.full((len(keys), 2), grad, np.float32), 1)], 1, 1.0)


def rows_of(table, slots=ALL):
    """Key -> value of all rows."""
    keys, slot, values = [], slots.start, []
    for part, into in ((ExportPart.KEYS, keys), (ExportPart.VALUES, values)):
        slot = slots.start
        while slot is not None:
            piece, slot = table.export(part, slot, 1 << 20)
            into.extend(piece.tolist() if part is ExportPart.KEYS else piece[:, 0].tolist())
    assert len(keys) == len(table)
    return dict(zip(keys, values, strict=True))


def keys_of_one_slot(count, start=0):
    """Keys from `start` on that fall into one slot, the least first."""
    found, at, slot = [], start, None
    while len(found) < count:
        keys = np.arange(at, at + 100_000)
        slots = slots_of(keys)
        slot = slots[0] if slot is None else slot
        found += keys[slots == slot].tolist()
        at += 100_000
    return found[:count]


# -- deletion ----------------------------------------------------------------------------------------------------------

ONE_SLOT = keys_of_one_slot(40)
KEYS = st.one_of(
    st.sampled_from(ONE_SLOT), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1, -1, 0])
)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.lists(KEYS, max_size=30)), max_size=12))
def test_a_table_with_deletion_behaves_like_a_dictionary(course):
    table, model = new_table(), {}
    for is_push, keys in course:
        if is_push:
            push(table, *keys)
            for key in keys:
                model[key] = model.get(key, INITIAL) - 1.0
        else:
            there = {key for key in keys if key in model}
            assert table.evict(ids(*keys)) == len(there)
            for key in there:
                del model[key]
        assert rows_of(table) == model
        asked = ids(*keys)
        assert table.pull(asked, False)[:, 0].tolist() == [model.get(key, INITIAL) for key in keys]


def test_an_evicted_key_starts_anew_with_fresh_state():
    spec = TableSpec("user", 2, Adagrad(initial_accumulator_value=0.25).spec(), init_rows.constant(INITIAL))
    table, fresh = Table(spec, 0, ALL), Table(spec, 0, ALL)
    push(table, 7)
    assert table.evict(ids(7)) == 1
    push(table, 7)
    push(fresh, 7)
    assert rows_of(table) == rows_of(fresh)


def test_keys_without_rows_and_of_other_pservers_are_nothing_to_evict():
    table = new_table(range(5))
    assert table.evict(np.arange(1000)) == 0
    assert table.evict(ids()) == 0


def test_rows_deleted_in_any_order_leave_the_others_as_they_are():
    keys = keys_of_one_slot(300)
    rng = np.random.default_rng(0)
    table = new_table()
    push(table, *keys)
    left = set(keys)
    for key in rng.permutation(keys).tolist():
        assert table.evict(ids(key)) == 1
        left.remove(key)
        assert set(rows_of(table)) == left


def test_deleted_rows_and_regions_are_used_again():
    table = new_table()
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 100_000, np.int64)
    push(table, *keys)
    full = table.memory()
    for _ in range(5):
        assert table.evict(keys) == keys.size
        assert len(table) == 0
        keys = keys + 1
        push(table, *keys)
        assert table.memory().rows == full.rows
        # what the first course left in its pool's free regions may have to be split differently
        assert table.memory().beyond <= 1.5 * full.beyond


def test_a_slot_that_grows_and_shrinks_again_and_again_takes_no_more_memory():
    table, keys = new_table(), keys_of_one_slot(2000)
    push(table, *keys)
    most = table.memory().beyond
    for _ in range(10):
        table.evict(ids(*keys[3:]))
        assert sorted(rows_of(table)) == keys[:3]
        push(table, *keys)
        assert sorted(rows_of(table)) == keys
    assert table.memory().beyond <= 2 * most


def test_the_bytes_beyond_rows_are_below_forty_a_row_and_counted_to_the_byte():
    table = Table(TableSpec("user", 1, SGD().spec(), init_rows.zeros()), 0, ALL)
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 2_500_000, np.int64)
    for part in np.array_split(keys, 50):
        table.update([(part, np.zeros((part.size, 1), np.float32), 1)], 1, 1.0)
    rows, beyond = table.memory()
    assert rows == 4 * len(table)
    assert beyond < 40 * len(table)
    # entries come in regions of 64 bytes, each with one byte beside it
    directory = 3 * 8 * SLOTS + table._index.pool.nbytes
    assert (beyond - directory) % 65 == 0


# -- the rules ---------------------------------------------------------------------------------------------------------


def test_a_row_is_made_in_the_update_in_which_its_key_is_met_for_the_nth_time():
    table = new_table(min_count=3)
    for _ in range(2):
        push(table, 1, 1, 2)
        assert len(table) == 0
        assert table.pull(ids(1), False)[0, 0] == INITIAL
        assert not table.pull(ids(1), True).any()
    push(table, 1)
    assert rows_of(table) == {1: INITIAL - 1}
    push(table, 1, 2)
    assert rows_of(table) == {1: INITIAL - 2, 2: INITIAL - 1}


def test_a_candidate_is_forgotten_like_a_row_and_counts_from_one_again():
    table = new_table(min_count=2, ttl=3)
    push(table, 1)
    for _ in range(8):
        push(table)
    push(table, 1)
    assert len(table) == 0
    push(table, 1)
    assert len(table) == 1


def test_candidates_take_no_row_and_their_entries_are_used_again():
    table = new_table(min_count=2, ttl=2)
    for step in range(30):
        push(table, *range(1000 * step, 1000 * step + 1000))
    assert table.memory().rows == 0
    assert int(table._index.used.sum()) <= 1000 * (2 + policy_of(table_spec(min_count=2, ttl=2)).period)


def test_evicting_a_candidate_forgets_it():
    table = new_table(min_count=2)
    push(table, 1)
    assert table.evict(ids(1)) == 0
    push(table, 1)
    assert len(table) == 0


@pytest.mark.parametrize("ttl", [0, 1, 3, 4, 100])
def test_a_row_lives_for_ttl_steps_and_less_than_a_period_more(ttl):
    period = policy_of(table_spec(ttl=ttl)).period
    table, keys = new_table(ttl=ttl), list(range(50))
    push(table, *keys)
    for _ in range(ttl):
        assert len(table) == 50
        push(table)
    for _ in range(period):
        push(table)
    assert len(table) == 0


def test_a_row_that_is_met_does_not_expire_but_an_expired_one_starts_anew_even_if_met_in_that_step():
    table = new_table(ttl=1)  # every slot has its turn in each step
    for _ in range(4):
        push(table, 5)
    assert rows_of(table) == {5: INITIAL - 4}
    push(table)
    push(table, 5)
    assert rows_of(table) == {5: INITIAL - 1}


def test_the_period_is_bounded_and_never_longer_than_the_ttl():
    for ttl in (*range(1, 70), 1023, 1024, 1025, 10**9):
        assert 1 <= policy_of(table_spec(ttl=ttl)).period <= min(ttl, LONGEST_PERIOD)
    assert policy_of(table_spec(ttl=0)).period == 1
    assert policy_of(table_spec()).period == 0
    assert policy_of(table_spec(min_count=2)).candidate_ttl == CANDIDATE_TTL


def test_the_least_recently_used_row_of_a_slot_makes_room():
    a, b, c, d = keys_of_one_slot(4)
    table = new_table(max_rows=2 * SLOTS)
    push(table, b)
    push(table, a)
    push(table, a, b)
    push(table, a)
    push(table, c)
    assert set(rows_of(table)) == {a, c}
    push(table, a, c)
    push(table, d)  # a and c were last met in the same step: the least key goes
    assert set(rows_of(table)) == {c, d}


def test_the_least_often_used_row_of_a_slot_makes_room():
    a, b, c, d = keys_of_one_slot(4)
    table = new_table(max_rows=2 * SLOTS, evict="count")
    for _ in range(3):
        push(table, a)
    push(table, b)
    push(table, c)
    assert set(rows_of(table)) == {a, c}
    push(table, c)
    push(table, d)
    assert set(rows_of(table)) == {a, d}


def test_rows_met_in_a_step_make_no_room_in_it_and_the_least_new_keys_get_what_there_is():
    keys = keys_of_one_slot(6)
    table = new_table(max_rows=3 * SLOTS)
    push(table, keys[5])
    push(table, *reversed(keys))
    assert rows_of(table) == {keys[5]: INITIAL - 2, keys[0]: INITIAL - 1, keys[1]: INITIAL - 1}


def test_there_are_never_more_rows_than_max_rows_or_one_a_slot():
    for max_rows in (1, SLOTS - 1, SLOTS, 20_000):
        table = new_table(max_rows=max_rows)
        for step in range(3):
            push(table, *range(100_000 * step, 100_000 * step + 100_000))
            assert len(table) <= max(max_rows, SLOTS)
        assert len(table) > 0.9 * max(max_rows, SLOTS)


def test_a_pushed_key_of_another_pserver_is_a_bug_under_a_policy_too():
    table = new_table(range(int(slots_of(ids(1))[0])), min_count=2)
    with pytest.raises(InvariantError, match="'user'"):
        push(table, 1)


# -- all of it against plain dictionaries ------------------------------------------------------------------------------


class Plain:
    """A table with policy over dictionaries: key -> [value, last step, steps met]."""

    def __init__(self, spec):
        self.spec, self.policy = spec, policy_of(spec)
        self.step, self.rows, self.candidates = 0, {}, {}

    def update(self, grads):
        """One step with the sums of gradients by key."""
        self.step += 1
        rule = self.policy
        self._expire()
        for key in grads.keys() & self.rows.keys():
            self.rows[key][1:] = [self.step, self.rows[key][2] + 1]
        wanted = {}
        for key in grads.keys() - self.rows.keys():
            count = self.candidates.get(key, (0, 0))[0] + 1
            if count >= rule.min_count:
                wanted.setdefault(slot_of(key), []).append(key)
            if count < rule.min_count or key in self.candidates:
                self.candidates[key] = (count, self.step)
        for slot, keys in wanted.items():
            for key in self._with_room(slot, sorted(keys)):
                self.candidates.pop(key, None)
                self.rows[key] = [INITIAL, self.step, rule.min_count]
        for key in grads.keys() & self.rows.keys():
            self.rows[key][0] -= grads[key]

    def _expire(self):
        rule = self.policy
        turn = {
            k
            for k in (*self.rows, *self.candidates)
            if rule.period and slot_of(k) % rule.period == self.step % rule.period
        }
        for key in turn:
            if key in self.candidates and self.step - self.candidates[key][1] > rule.candidate_ttl:
                del self.candidates[key]
            if key in self.rows and rule.ttl >= 0 and self.step - self.rows[key][1] > rule.ttl:
                del self.rows[key]

    def _with_room(self, slot, keys):
        if not self.policy.max_rows:
            return keys
        limit = self.policy.max_rows
        share = max(1, limit * (slot + 1) // SLOTS - limit * slot // SLOTS)
        here = [key for key in self.rows if slot_of(key) == slot]
        room = share - len(here)
        victims = [key for key in here if self.rows[key][1] < self.step]
        victims.sort(key=lambda key: (self.rows[key][2] if self.policy.by_count else 0, self.rows[key][1], key))
        for key in victims[: max(len(keys) - room, 0)]:
            del self.rows[key]
            room += 1
        return keys[: max(room, 0)]


def slot_of(key):
    return int(slots_of(ids(key))[0])


SOME = [*ONE_SLOT[:10], *keys_of_one_slot(6, 5_000_000), -(2**63), 2**63 - 1, -1, 0, 12, 13]


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 3),
    st.sampled_from([None, 0, 1, 2, 5]),
    st.sampled_from([None, 1, SLOTS, 3 * SLOTS, 5 * SLOTS + 7]),
    st.sampled_from(["recent", "count"]),
    st.lists(st.lists(st.tuples(st.sampled_from(SOME), st.integers(-4, 4)), max_size=14), max_size=14),
    st.integers(0, 2**32),
)
def test_rows_are_those_of_the_rules_on_one_two_and_three_pservers(min_count, ttl, max_rows, evict, course, seed):
    spec = table_spec(min_count=min_count, ttl=ttl, max_rows=max_rows, evict=evict)
    plain = Plain(spec)
    tables = {n: [Table(spec, 0, slots_owned(place, n)) for place in range(n)] for n in (1, 2, 3)}
    rng = np.random.default_rng(seed)
    for batch in course:
        grads = {}
        for key, grad in batch:
            grads[key] = grads.get(key, 0) + grad
        plain.update(grads)
        for places in tables.values():
            shuffled = [batch[i] for i in rng.permutation(len(batch))]
            for place, table in enumerate(places):
                owned = slots_owned(place, len(places))
                here = [(key, grad) for key, grad in shuffled if slot_of(key) in owned]
                values = np.array([[grad, grad] for _, grad in here], np.float32).reshape(-1, 2)
                table.update([(ids(*(key for key, _ in here)), values, 1)], 1, 1.0)
        expected = {key: row[0] for key, row in plain.rows.items()}
        for n, places in tables.items():
            found = {}
            for place, table in enumerate(places):
                found |= rows_of(table, slots_owned(place, n))
            assert found == expected
        assert int(tables[1][0]._index.used.sum()) == len(plain.rows) + len(plain.candidates)
