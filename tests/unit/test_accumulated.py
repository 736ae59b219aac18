"""Several batches contribute as one."""

import numpy as np
import pytest

from evergrad import init_rows
from evergrad.kernels.half import encoded
from evergrad.messages import (
    GroupKind,
    GroupSpec,
    ParameterSpec,
    Schema,
    TableKeys,
    TableSpec,
    UpdateName,
    UpdateSpec,
    Wire,
)
from evergrad.optim import SGD
from evergrad.trainer.accumulated import Accumulated
from evergrad.trainer.trainer import RowGrads, SpanGrads

TABLES = tuple(TableSpec(name, 2, SGD().spec(), init_rows.zeros()) for name in ("a", "b"))


def group(kind, dtype="float32"):
    parameters = (ParameterSpec("p", (1,), dtype), ParameterSpec("q", (2,), dtype))
    return GroupSpec(kind, SGD().spec() if kind is GroupKind.TRAINED else None, parameters)


GROUPS = (group(GroupKind.TRAINED), group(GroupKind.AVERAGED), group(GroupKind.LOWEST, "int64"))


def accumulated(wire=Wire.FLOAT32):
    update = UpdateSpec(UpdateName.ASYNC, 8, push_every=4)
    return Accumulated(Schema(0, update, TABLES, GROUPS, wire))


def rows(table, keys, grads, lr=1.0):
    values = np.repeat(np.array(grads, np.float32)[:, None], 2, axis=1)
    return RowGrads(table, lr, np.array(keys, np.int64), values)


def span(number, values, present=(1, 1), lr=1.0):
    dtype = np.int64 if number == 2 else np.float32
    return SpanGrads(number, lr, np.array(values, dtype), np.array(present, np.uint8))


def test_the_gradient_of_a_row_is_its_mean_over_all_samples():
    both = accumulated()
    both.add([rows(0, [7, 8], [1.0, 2.0])], [], 3, ())
    both.add([rows(0, [8, 9], [6.0, 5.0])], [], 1, ())
    (only,) = both.together().rows
    found = dict(zip(only.keys.tolist(), only.grads.tolist(), strict=True))
    assert found == {7: [0.75, 0.75], 8: [3.0, 3.0], 9: [1.25, 1.25]}


def test_the_gradient_of_a_parameter_is_its_mean_over_all_samples_also_of_batches_without_it():
    both = accumulated()
    both.add([], [span(0, [4.0, 8.0, 8.0])], 3, ())
    both.add([], [span(0, [0.0, 4.0, 0.0], present=(0, 1))], 1, ())
    both.add([rows(0, [1], [1.0])], [], 4, ())
    together = both.together()
    assert together.spans[0].values.tolist() == [1.5, 3.5, 3.0]
    assert together.spans[0].present.tolist() == [1, 1]
    assert together.rows[0].grads.tolist() == [[0.5, 0.5]]


def test_a_parameter_that_no_batch_has_is_not_present():
    both = accumulated()
    for _ in range(2):
        both.add([], [span(0, [0.0, 1.0, 1.0], present=(0, 1))], 1, ())
    assert both.together().spans[0].present.tolist() == [0, 1]


def test_sums_are_taken_in_float64_and_rounded_once():
    values = np.random.default_rng(3).normal(size=(5, 3)).astype(np.float32)
    samples = [3, 1, 4, 1, 5]
    all_ = accumulated()
    for grads, n in zip(values, samples, strict=True):
        all_.add([], [span(0, grads)], n, ())
    expected = sum(n * grads.astype(np.float64) for grads, n in zip(values, samples, strict=True)) / sum(samples)
    assert all_.together().spans[0].values.tobytes() == expected.astype(np.float32).tobytes()


def test_the_learning_rate_of_the_first_batch_that_names_a_table_or_group_counts():
    both = accumulated()
    both.add([rows(0, [1], [1.0], lr=0.5)], [], 1, ())
    both.add([rows(1, [1], [1.0], lr=0.25), rows(0, [1], [1.0], lr=0.25)], [span(0, [1, 1, 1], lr=0.25)], 1, ())
    both.add([rows(1, [1], [1.0], lr=0.125)], [span(0, [1, 1, 1], lr=0.125)], 1, ())
    together = both.together()
    assert {r.table: r.lr for r in together.rows} == {0: 0.5, 1: 0.25}
    assert together.spans[0].lr == 0.25


def test_buffers_are_those_of_the_last_batch_that_changed_them():
    both = accumulated()
    both.add([], [span(1, [1.0, 2.0, 3.0]), span(2, [1, 2, 3], present=(1, 0))], 9, ())
    both.add([], [span(1, [9.0, 0.0, 0.0], present=(1, 0))], 1, ())
    both.add([], [span(2, [0, 8, 9], present=(0, 1))], 1, ())
    averaged, lowest = both.together().spans
    assert (averaged.values.tolist(), averaged.present.tolist()) == ([9.0, 2.0, 3.0], [1, 1])
    assert (lowest.values.tolist(), lowest.present.tolist()) == ([1, 8, 9], [1, 1])
    assert lowest.values.dtype == np.int64


def test_rows_to_evict_are_those_of_all_batches():
    both = accumulated()
    first, second = (TableKeys(0, np.array([n])) for n in (1, 2))
    both.add([], [], 1, [first])
    both.add([], [], 1, [second])
    assert both.together().evict == [first, second]


def test_one_batch_alone_is_what_it_is():
    one = accumulated()
    gradients, values = rows(0, [1], [0.1]), span(0, [0.1, 0.2, 0.3])
    one.add([gradients], [values], 7, ())
    together = one.together()
    assert together.rows[0].grads is gradients.grads
    assert together.spans[0] is values


def test_nothing_is_nothing():
    assert not any(accumulated().together())


@pytest.mark.parametrize("batches", [1, 2])
def test_rows_go_out_as_the_wire_has_them(batches):
    some = accumulated(Wire.BFLOAT16)
    for _ in range(batches):
        some.add([rows(0, [1], [0.1])], [], 1, ())
    grads = some.together().rows[0].grads
    assert grads.tolist() == encoded(np.full((1, 2), 0.1, np.float32), Wire.BFLOAT16).tolist()
    assert grads.dtype == np.uint16
