import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from evergrad import init_rows
from evergrad.errors import InvariantError
from evergrad.kernels.half import decoded, encoded
from evergrad.kernels.hashing import slots_of
from evergrad.kernels.initial import initial_rows, table_seed
from evergrad.messages import ExportPart, TableSpec, Wire
from evergrad.optim import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from evergrad.placement import SLOTS, slots_owned
from evergrad.pserver.table import Table

ALL = range(SLOTS)
EVERY_RULE = [
    SGD(),
    SGD(momentum=0.9, dampening=0.5, weight_decay=0.1),
    Adagrad(lr_decay=0.1, initial_accumulator_value=0.5),
    RowWiseAdagrad(weight_decay=0.1),
    Adam(),
    AdamW(weight_decay=0.1),
    FTRL(l1=0.1),
    FTRL(l1=0.1, lr_power=-0.6),
]
ANY_KEY = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.integers(-20, 20), st.sampled_from([-(2**63), 2**63 - 1, -1, 0])
)


def table_spec(rule=None, *, dim=3, initializer=None, unseen_zero=True):
    spec = (rule or Adagrad()).spec()
    return TableSpec("user", dim, spec, initializer or init_rows.normal(), unseen_zero)


def ids(*keys):
    return np.array(keys, np.int64)


def random_keys(count, seed=0):
    return np.random.default_rng(seed).integers(-(2**63), 2**63, count, np.int64, endpoint=False)


def random_grads(keys, dim=3, seed=1):
    return np.random.default_rng(seed).standard_normal((keys.size, dim)).astype(np.float32)


def exported(table, part, slots=ALL, limit=1000):
    pieces, slot = [], slots.start
    while slot is not None:
        piece, slot = table.export(part, slot, limit)
        pieces.append(piece)
    return np.concatenate(pieces)


def test_a_pull_of_unseen_keys_yields_initial_values_and_makes_no_row():
    spec = table_spec()
    table = Table(spec, 7, ALL)
    keys = ids(5, -(2**63), 5, 2**63 - 1)
    expected = initial_rows(keys, 3, spec.initializer, table_seed(7, "user"))
    assert (table.pull(keys, False) == expected).all()
    assert len(table) == 0


def test_in_evaluation_an_unseen_key_yields_zeros_or_its_initial_value_as_the_table_says():
    keys = ids(1, 2)
    zeros = Table(table_spec(), 0, ALL).pull(keys, True)
    initial = Table(table_spec(unseen_zero=False), 0, ALL)
    assert not zeros.any()
    assert (initial.pull(keys, True) == initial.pull(keys, False)).all()


def test_an_update_makes_the_rows_it_names_from_their_initial_values():
    table = Table(table_spec(SGD()), 0, ALL)
    keys = ids(3, -1, 0)
    before = table.pull(keys, False)
    table.update([(keys, np.ones((3, 3), np.float32), 8)], 8, 0.25)
    assert len(table) == 3
    assert (table.pull(keys, True) == (before.astype(np.float64) - 0.25).astype(np.float32)).all()


def test_a_pulled_array_is_a_fresh_one():
    table = Table(table_spec(), 0, ALL)
    table.update([(ids(1), np.ones((1, 3), np.float32), 1)], 1, 0.1)
    first = table.pull(ids(1), False)
    kept = first.copy()
    first[:] = 99
    assert (table.pull(ids(1), False) == kept).all()


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_the_mean_over_parts_is_taken_in_task_order_in_float64_and_rounded_once(rule):
    a, b = ids(1, 2, 3), ids(3, 4, 1)
    ga, gb = random_grads(a, seed=1), random_grads(b, seed=2)
    mean = {}
    for keys, grads, samples in ((a, ga, 3), (b, gb, 4)):
        for key, grad in zip(keys.tolist(), grads, strict=True):
            mean[key] = mean.get(key, 0.0) + samples * grad.astype(np.float64)
    in_parts, at_once = Table(table_spec(rule), 0, ALL), Table(table_spec(rule), 0, ALL)
    in_parts.update([(a, ga, 3), (b, gb, 4)], 9, 0.1)
    keys = ids(*mean)
    at_once.update([(keys, np.array([mean[k] / 9 for k in mean]).astype(np.float32), 9)], 9, 0.1)
    assert in_parts.pull(keys, False).tobytes() == at_once.pull(keys, False).tobytes()


def test_one_part_with_all_samples_counts_as_it_is_by_either_path():
    keys = random_keys(100)
    grads = random_grads(keys)
    fast, merged = Table(table_spec(), 0, ALL), Table(table_spec(), 0, ALL)
    fast.update([(keys, grads, 7)], 7, 0.1)
    merged.update([(keys, grads, 7), (ids(), np.empty((0, 3), np.float32), 0)], 7, 0.1)
    assert fast.pull(keys, False).tobytes() == merged.pull(keys, False).tobytes()


def test_a_key_that_stands_twice_in_a_part_is_summed_and_applied_once():
    twice, once = Table(table_spec(), 0, ALL), Table(table_spec(), 0, ALL)
    twice.update([(ids(5, 6, 5), np.array([[1] * 3, [2] * 3, [3] * 3], np.float32), 2)], 2, 0.1)
    once.update([(ids(5, 6), np.array([[4] * 3, [2] * 3], np.float32), 2)], 2, 0.1)
    assert (twice.pull(ids(5, 6), False) == once.pull(ids(5, 6), False)).all()
    assert len(twice) == 2


def test_an_update_without_keys_counts_as_one_of_the_table():
    waited, fresh = Table(table_spec(Adam()), 0, ALL), Table(table_spec(Adam()), 0, ALL)
    waited.update([], 4, 0.1)
    waited.update([(ids(), np.empty((0, 3), np.float32), 4)], 4, 0.1)
    for table in (waited, fresh):
        table.update([(ids(1), np.ones((1, 3), np.float32), 4)], 4, 0.1)
    assert (waited.pull(ids(1), False) != fresh.pull(ids(1), False)).any()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.tuples(ANY_KEY, st.integers(-4, 4)), max_size=40), max_size=6))
def test_a_table_behaves_like_a_dictionary(batches):
    table = Table(table_spec(SGD(), dim=2, initializer=init_rows.constant(1.5)), 0, ALL)
    model: dict[int, float] = {}
    for batch in batches:
        keys = ids(*(key for key, _ in batch))
        table.update([(keys, np.array([[g, g] for _, g in batch], np.float32).reshape(-1, 2), 1)], 1, 0.5)
        for key, grad in batch:
            model[key] = model.get(key, 1.5) - 0.5 * grad
        assert len(table) == len(model)
    known = ids(*model)
    assert table.pull(known, False)[:, 1].tolist() == list(model.values())
    order = sorted(model, key=lambda key: (slots_of(ids(key))[0], key))
    assert exported(table, ExportPart.KEYS).tolist() == order
    assert exported(table, ExportPart.VALUES)[:, 0].tolist() == [model[key] for key in order]


@pytest.mark.parametrize("slots", [ALL, range(40, 43)])
def test_rows_survive_growth_in_many_slots_and_in_few(slots):
    keys = random_keys(60_000 if slots is ALL else 6_000_000)
    owned = slots_of(keys)
    keys = keys[(owned >= slots.start) & (owned < slots.stop)]
    table = Table(table_spec(initializer=init_rows.uniform()), 3, slots)
    before = table.pull(keys, False)
    for batch in np.array_split(keys, 20):
        table.update([(batch, np.zeros((batch.size, 3), np.float32), 1)], 1, 0.1)
    assert len(table) == keys.size
    assert table.pull(keys, True).tobytes() == before.tobytes()
    assert (np.sort(exported(table, ExportPart.KEYS, slots)) == np.sort(keys)).all()


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_the_bits_do_not_depend_on_order_of_arrival_nor_on_the_number_of_pservers(rule):
    keys = random_keys(2000)
    grads = random_grads(keys)
    whole = Table(table_spec(rule), 0, ALL)
    shuffled = np.random.default_rng(9).permutation(keys.size)
    for _ in range(3):
        whole.update([(keys[shuffled], grads[shuffled], 2)], 2, 0.1)
    pieces = []
    for place in range(3):
        owned = slots_owned(place, 3)
        here = np.isin(slots_of(keys), np.arange(owned.start, owned.stop))
        part = Table(table_spec(rule), 0, owned)
        for _ in range(3):
            part.update([(keys[here], grads[here], 2)], 2, 0.1)
        pieces.append([exported(part, p, owned) for p in ExportPart])
    for number, p in enumerate(ExportPart):
        assert np.concatenate([piece[number] for piece in pieces]).tobytes() == exported(whole, p).tobytes()


def test_an_export_returns_whole_slots_up_to_about_its_limit():
    table = Table(table_spec(), 0, ALL)
    keys = random_keys(5000)
    table.update([(keys, random_grads(keys), 1)], 1, 0.1)
    slot = 0
    while slot is not None:
        part, following = table.export(ExportPart.KEYS, slot, 800)
        assert part.nbytes <= 800
        assert following is None or following > slot
        slot = following
    first = int(slots_of(keys).min())
    one_slot, following = table.export(ExportPart.KEYS, first, 1)
    assert following == first + 1
    assert (slots_of(one_slot) == first).all()
    assert one_slot.size > 0


def test_a_table_without_slots_or_without_rows_is_empty():
    for slots in (range(0), range(5, 5), ALL):
        table = Table(table_spec(), 0, slots)
        table.update([], 1, 0.1)
        assert len(table) == 0
        assert table.pull(ids(), False).shape == (0, 3)
        assert table.export(ExportPart.KEYS, slots.start, 100)[0].shape == (0,)
        assert table.export(ExportPart.VALUES, slots.start, 100)[0].shape == (0, 3)
        assert exported(table, ExportPart.KEYS, slots).size == 0


def test_a_pushed_key_of_another_pserver_is_a_bug_and_says_so():
    key = ids(1)
    owner = int(slots_of(key)[0])
    with pytest.raises(InvariantError, match="'user'"):
        Table(table_spec(), 0, range(owner)).update([(key, np.ones((1, 3), np.float32), 1)], 1, 0.1)


@pytest.mark.parametrize("wire", [Wire.BFLOAT16, Wire.FLOAT16])
@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
@pytest.mark.parametrize("options", [{}, {"min_count": 2, "ttl": 3}])
def test_on_a_wire_of_sixteen_bits_the_bits_are_those_of_converting_in_a_pass_of_its_own(wire, rule, options):
    spec = replace(table_spec(rule, dim=19), **options)
    short, plain = Table(spec, 0, ALL, wire), Table(spec, 0, ALL)
    keys = random_keys(300)
    for step in range(4):
        parts = []
        for samples in range(1, 1 + step % 3):
            met = keys[np.random.default_rng(step + samples).integers(0, 200, 150)]
            parts.append((met, encoded(random_grads(met, 19, step + samples), wire), samples))
        total = sum(samples for _, _, samples in parts)
        short.update(parts, total, 0.1)
        plain.update([(met, decoded(grads, wire), samples) for met, grads, samples in parts], total, 0.1)
    assert 0 < len(short) < 300
    for evaluating in (False, True):
        rows = short.pull(keys, evaluating)
        assert rows.dtype == np.uint16
        assert rows.tobytes() == encoded(plain.pull(keys, evaluating), wire).tobytes()
    assert exported(short, ExportPart.VALUES).tobytes() == exported(plain, ExportPart.VALUES).tobytes()


def test_arrays_that_lie_unaligned_and_read_only_in_a_network_buffer_are_taken():
    keys = random_keys(50)
    grads = random_grads(keys)
    raw = b"\0" + keys.tobytes() + grads.tobytes()
    wired, local = Table(table_spec(), 0, ALL), Table(table_spec(), 0, ALL)
    wired_keys = np.frombuffer(raw, np.int64, 50, 1)
    wired_grads = np.frombuffer(raw, np.float32, 150, 401).reshape(50, 3)
    for parts in (1, 2):
        wired.update([(wired_keys, wired_grads, 1)] * parts, parts, 0.1)
        local.update([(keys, grads, 1)] * parts, parts, 0.1)
    assert wired.pull(wired_keys, False).tobytes() == local.pull(keys, False).tobytes()
