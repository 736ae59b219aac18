"""A trainer's own copy of the model for the length of a task: what steps make of it, and what is left of them."""

import numpy as np
import pytest

from evergrad.job.local import LocalModel, TaskRows
from evergrad.messages import GroupKind, GroupSpec, ParameterSpec, TableKeys
from evergrad.optim import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad
from evergrad.trainer.trainer import RowGrads, SpanGrads

MOMENTUM = SGD(momentum=0.5).spec()
KEYS = np.array([5, -1, 2**63 - 1], np.int64)


def f32(*values):
    return np.array(values, np.float32)


def rows_of(rule=MOMENTUM, dim=1):
    table = TaskRows(dim, rule)
    table.take(KEYS, np.arange(3 * dim, dtype=np.float32).reshape(3, dim))
    return table


def group(kind, rule, *sizes, dtype="float32"):
    return GroupSpec(kind, rule, tuple(ParameterSpec(f"p{i}", (n,), dtype) for i, n in enumerate(sizes)))


GROUPS = (
    group(GroupKind.TRAINED, MOMENTUM, 1, 2),
    group(GroupKind.AVERAGED, None, 1, 1),
    group(GroupKind.LOWEST, None, 1, dtype="int64"),
    group(GroupKind.FROZEN, None, 2),
)
BASE = (f32(1, 2, 3), f32(10, np.inf), np.array([7]), f32(4, 5))


def model(keeps_state=False):
    found = LocalModel([(1, MOMENTUM)], GROUPS, keeps_state)
    begin(found)
    return found


def begin(found):
    found.take_dense(BASE)
    found.take_rows(0, KEYS, f32(0, 1, 2)[:, None])


def step(found, grad=1.0, samples=4):
    """One step in which every second thing is met."""
    spans = [
        SpanGrads(0, 1.0, f32(grad, 0, 0), np.array([1, 0], np.uint8)),
        SpanGrads(1, 0.0, f32(12, 0), np.array([1, 0], np.uint8)),
        SpanGrads(2, 0.0, np.array([8]), np.array([1], np.uint8)),
    ]
    found.step([RowGrads(0, 1.0, KEYS[[2, 0]], f32(grad, 2 * grad)[:, None])], spans, samples)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_missing_until_they_are_taken():
    table = rows_of()
    more = np.array([7, 5, 0, -1], np.int64)
    assert table.missing(more).tolist() == [7, 0]
    table.take(np.array([7, 0]), f32(9, 8)[:, None])
    assert table.missing(more).size == 0
    assert table.values(more).tolist() == [[9], [0], [8], [1]]


def test_a_step_changes_the_rows_it_meets_and_no_other():
    table = rows_of()
    table.step(KEYS[[1]], f32(4)[:, None], 0.5)
    assert table.values(KEYS).tolist() == [[0], [-1], [2]]
    keys, difference = table.difference()
    assert (keys.tolist(), difference.tolist()) == ([-1], [[2]])


def test_state_of_rows_goes_on_from_step_to_step():
    table = rows_of()
    for _ in range(3):
        table.step(KEYS[:1], f32(1)[:, None], 1.0)
    assert table.values(KEYS[:1]).tolist() == [[-1 - 1.5 - 1.75]]


def test_a_row_met_later_begins_with_the_state_of_a_new_one():
    table = rows_of(Adagrad(initial_accumulator_value=3.0).spec())
    table.take(np.array([8]), f32(1)[:, None])
    table.step(np.array([8, 5]), f32(1, 1)[:, None], 2.0)
    assert table.values(np.array([8, 5])).tolist() == [[0.0], [-1.0]]


@pytest.mark.parametrize("rule", [SGD(), SGD(momentum=0.9, dampening=0.1), Adagrad(), RowWiseAdagrad(), Adam(), FTRL()])
def test_many_rows_of_every_rule_are_kept_apart_while_the_table_grows(rule):
    table, random = TaskRows(3, rule.spec()), np.random.default_rng(0)
    keys = random.permutation(np.unique(random.integers(-(2**63), 2**63 - 1, 20_000, np.int64)))
    values = random.standard_normal((keys.size, 3), np.float32)
    for part in np.array_split(np.arange(keys.size), 7):
        table.take(keys[part], values[part])
        table.step(keys[part], np.zeros((part.size, 3), np.float32), 0.1)
    assert table.missing(keys).size == 0
    np.testing.assert_allclose(table.values(keys), values, rtol=1e-6, atol=1e-6)  # FTRL finds z from the weight
    met, difference = table.difference()
    assert met.tolist() == keys.tolist()
    np.testing.assert_allclose(difference, 0, atol=1e-6)


def test_a_step_without_keys_counts_as_one_of_the_table():
    table = TaskRows(1, Adam().spec())
    table.step(np.empty(0, np.int64), np.empty((0, 1), np.float32), 1.0)
    assert table.updates == 1
    assert [part.size for part in table.difference()] == [0, 0]


# -- a task ------------------------------------------------------------------------------------------------------------


def test_a_task_without_a_step_has_no_difference():
    found = model()
    assert found.difference(1.0) == ([], [])
    assert found.samples == 0


def test_a_difference_is_of_what_steps_have_met_and_buffers_are_as_they_are_now():
    found = model()
    step(found, 1.0)
    step(found, 2.0, samples=3)
    assert found.samples == 7
    (rows,), (trained, averaged, lowest) = found.difference(0.25)
    assert (rows.table, rows.lr, rows.keys.tolist()) == (0, 0.25, [5, 2**63 - 1])
    assert rows.grads.tolist() == [[2 + 5], [1 + 2.5]]
    assert (trained.group, trained.lr, trained.values.tolist(), trained.present.tolist()) == (
        0,
        0.25,
        [3.5, 0, 0],
        [1, 0],
    )
    assert (averaged.group, averaged.lr, averaged.values.tolist(), averaged.present.tolist()) == (1, 0, [12, 0], [1, 0])
    assert (lowest.group, lowest.values.tolist(), lowest.values.dtype) == (2, [8], np.int64)


def test_what_was_pulled_is_not_changed_by_steps():
    found = model()
    step(found)
    assert [values.tolist() for values in BASE] == [[1, 2, 3], [10, np.inf], [7], [4, 5]]
    assert found.dense(0).tolist() == [0, 2, 3]
    assert found.dense(3) is BASE[3]


def test_a_new_task_begins_without_anything_of_the_last():
    found = model()
    step(found)
    found.evict.append(TableKeys(0, KEYS))
    found.forget()
    assert not found.has_values
    assert found.missing([(0, KEYS)])[0][1].tolist() == KEYS.tolist()
    assert (found.samples, found.evict) == (0, [])
    begin(found)
    step(found)
    first = model()
    step(first)
    for mine, other in zip(found.difference(1.0), first.difference(1.0), strict=True):
        for a, b in zip(mine, other, strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_state_that_is_kept_goes_on_in_the_next_task_and_values_are_pulled_anew():
    found = model(keeps_state=True)
    step(found)
    found.forget()
    assert found.missing([(0, KEYS)])[0][1].tolist() == KEYS.tolist()
    begin(found)
    assert found.difference(1.0) == ([], [])
    step(found)
    (rows,), (trained, *_) = found.difference(1.0)
    assert rows.grads.tolist() == [[3], [1.5]]
    assert trained.values.tolist() == [1.5, 0, 0]


def test_a_row_whose_state_is_kept_and_that_a_task_does_not_meet_is_none_of_its_difference():
    found = model(keeps_state=True)
    step(found)
    found.forget()
    found.take_dense(BASE)
    found.take_rows(0, np.array([1]), f32(3)[:, None])
    found.step([RowGrads(0, 1.0, np.array([1]), f32(1)[:, None])], [], 1)
    (rows,), spans = found.difference(1.0)
    assert (rows.keys.tolist(), rows.grads.tolist(), spans) == ([1], [[1]], [])
