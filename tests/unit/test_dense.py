import numpy as np
import pytest

from evergrad.messages import GroupKind, GroupSpec, ParameterSpec
from evergrad.optim import FTRL, SGD, Adagrad, Adam, AdamW
from evergrad.placement import span_owned
from evergrad.pserver.dense import DenseGroup

SIZES = (7, 1, 12, 3)
EVERY_RULE = [
    SGD(),
    SGD(momentum=0.9, dampening=0.5, weight_decay=0.1),
    Adagrad(lr_decay=0.1, initial_accumulator_value=0.1),
    Adam(),
    AdamW(weight_decay=0.1),
    FTRL(l1=0.1),
    FTRL(l1=0.1, lr_power=-0.6),
]


def group_spec(kind=GroupKind.TRAINED, rule=None):
    rule_spec = (rule or SGD()).spec() if kind is GroupKind.TRAINED else None
    dtype = "int64" if kind is GroupKind.LOWEST else "float32"
    return GroupSpec(kind, rule_spec, tuple(ParameterSpec(f"p{i}", (n,), dtype) for i, n in enumerate(SIZES)))


def whole(spec):
    group = DenseGroup(spec, range(spec.size))
    rng = np.random.default_rng(0)
    if spec.kind is GroupKind.LOWEST:
        group.set(rng.integers(-9, 9, spec.size))
    else:
        group.set(rng.standard_normal(spec.size).astype(np.float32))
    return group


def part(spec, samples, *present, seed=1):
    values = np.random.default_rng(seed).standard_normal(spec.size).astype(np.float32)
    if spec.kind is GroupKind.LOWEST:
        values = (1000 * values).astype(np.int64)
    return values, np.array([n in present for n in range(len(SIZES))], np.uint8), samples


def test_a_trained_group_takes_one_step_with_the_mean_gradient():
    spec = group_spec()
    group = whole(spec)
    before = group.values
    a, b = part(spec, 3, 0, 1, 2, 3, seed=1), part(spec, 5, 0, 1, 2, 3, seed=2)
    group.update([a, b], 8, 0.5)
    mean = ((3 * a[0].astype(np.float64) + 5 * b[0].astype(np.float64)) / 8).astype(np.float32)
    assert (group.values == (before - 0.5 * mean.astype(np.float64)).astype(np.float32)).all()


def test_a_task_without_a_gradient_counts_as_zero_in_the_mean():
    spec = group_spec()
    group = whole(spec)
    before = group.values
    values, flags, _ = part(spec, 2, 2)
    group.update([part(spec, 6), (values, flags, 2)], 8, 1.0)
    moved = before - (values.astype(np.float64) * 2 / 8).astype(np.float32)
    assert (group.values[8:20] == moved[8:20].astype(np.float32)).all()


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
def test_a_parameter_no_task_has_is_left_alone_with_its_state_and_its_count(rule):
    spec = group_spec(rule=rule)
    skipped, alone = whole(spec), whole(spec)
    before = skipped.values
    skipped.update([part(spec, 4, 0, 1, 3)], 4, 0.1)
    assert (skipped.values[8:20] == before[8:20]).all()
    assert (skipped.values[:8] != before[:8]).any()
    for group in (skipped, alone):
        group.update([part(spec, 4, 2, seed=3)], 4, 0.1)
    assert (skipped.values[8:20] == alone.values[8:20]).all()


def test_one_part_with_all_samples_is_applied_as_it_is():
    spec = group_spec()
    group = whole(spec)
    before = group.values
    only = part(spec, 7, 0, 1, 2, 3)
    group.update([only], 7, 1.0)
    assert (group.values == (before - only[0].astype(np.float64)).astype(np.float32)).all()


def test_an_averaged_buffer_is_the_mean_over_samples_where_an_absent_one_keeps_the_old():
    spec = group_spec(GroupKind.AVERAGED)
    group = whole(spec)
    old = group.values.astype(np.float64)
    a, b = part(spec, 1, 0, 2, seed=1), part(spec, 3, 0, seed=2)
    group.update([a, b], 4, 0.0)
    assert (
        group.values[:7] == ((a[0].astype(np.float64) + 3 * b[0].astype(np.float64)) / 4).astype(np.float32)[:7]
    ).all()
    assert (group.values[8:20] == ((a[0] + 3 * old) / 4).astype(np.float32)[8:20]).all()
    assert (group.values[7] == old[7]) & (group.values[20:] == old[20:]).all()


def test_a_lowest_buffer_takes_the_first_task_that_has_it():
    spec = group_spec(GroupKind.LOWEST)
    group = whole(spec)
    old = group.values
    a, b = part(spec, 1, 2, seed=1), part(spec, 9, 0, 2, seed=2)
    group.update([a, b], 10, 0.0)
    assert group.values.dtype == np.int64
    assert (group.values[:7] == b[0][:7]).all()
    assert (group.values[8:20] == a[0][8:20]).all()
    assert (group.values[20:] == old[20:]).all()


def test_a_frozen_group_is_never_updated():
    spec = group_spec(GroupKind.FROZEN)
    group = whole(spec)
    before = group.values.copy()
    group.update([part(spec, 1, 0, 1, 2, 3)], 1, 1.0)
    assert (group.values == before).all()


@pytest.mark.parametrize("kind", list(GroupKind))
def test_values_given_out_are_never_changed_later(kind):
    spec = group_spec(kind, Adam())
    group = whole(spec)
    given = group.values
    kept = given.copy()
    group.update([part(spec, 1, 0, 1, 2, 3)], 1, 0.1)
    group.set(np.zeros_like(given))
    assert (given == kept).all()


def test_what_was_set_may_be_changed_by_its_owner():
    spec = group_spec()
    group = DenseGroup(spec, range(spec.size))
    mine = np.ones(spec.size, np.float32)
    group.set(mine)
    mine[:] = 5
    assert (group.values == 1).all()


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
@pytest.mark.parametrize("places", [2, 3, 5, 40])
def test_a_group_cut_over_pservers_has_the_same_bits(rule, places):
    spec = group_spec(rule=rule)
    one = whole(spec)
    spans = [span_owned(spec.size, place, places) for place in range(places)]
    cut = [DenseGroup(spec, span) for span in spans]
    for group, span in zip(cut, spans, strict=True):
        group.set(one.values[span.start : span.stop])
    for step in range(5):
        parts = [part(spec, 3, 0, 2, seed=step), part(spec, 4, 0, 1, seed=50 + step)]
        one.update(parts, 9, 0.1)
        for group, span in zip(cut, spans, strict=True):
            group.update([(v[span.start : span.stop], flags, n) for v, flags, n in parts], 9, 0.1)
    assert np.concatenate([group.values for group in cut]).tobytes() == one.values.tobytes()


def test_tasks_that_changed_no_buffer_of_a_group_stand_for_the_old_values():
    spec = group_spec(GroupKind.AVERAGED)
    group = whole(spec)
    old = group.values.copy()
    values, flags, _ = part(spec, 1, *range(len(spec.parameters)))
    group.update([(values, flags, 1)], 4, 0.0)
    np.testing.assert_allclose(group.values, (values.astype("f8") + 3 * old) / 4, rtol=1e-6)
