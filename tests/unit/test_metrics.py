"""Metrics that add up."""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evergrad import metrics
from evergrad.errors import DataError
from evergrad.messages import Partial


def exact_auc(scores, labels):
    """The share of (positive, negative) pairs in the right order, ties counting half, pair by pair."""
    positives, negatives = scores[labels == 1], scores[labels == 0]
    below = np.sort(negatives)
    wins = np.searchsorted(below, positives, "left") + np.searchsorted(below, positives, "right")
    return wins.sum() / 2 / (len(positives) * len(negatives))


def total(partials):
    return metrics.result(reduce(metrics.merge, partials))


# -- mean and sums -----------------------------------------------------------------------------------------------------


def test_a_mean_counts_every_sample_once_whatever_the_batches():
    values = torch.arange(10.0)
    assert total([metrics.mean(values[:7]), metrics.mean(values[7:9]), metrics.mean(values[9])]) == 4.5


def test_a_weighted_mean_counts_by_weight():
    assert total([metrics.mean(1.0, weights=3), metrics.mean(torch.tensor(5.0), weights=1)]) == 2.0
    assert metrics.result(metrics.mean(np.array([1.0, 3.0]), weights=[1, 3])) == 2.5


def test_the_mean_of_nothing_is_nan():
    assert math.isnan(metrics.result(metrics.mean([])))


def test_weights_of_another_shape_are_refused():
    with pytest.raises(DataError, match=r"shape \(2,\), weights \(\)"):
        metrics.mean([1.0, 2.0], weights=2)


def test_booleans_and_half_precision_can_be_averaged():
    assert metrics.result(metrics.mean(torch.tensor([True, False]))) == 0.5
    assert metrics.result(metrics.mean(torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True))) == 1.5


@pytest.mark.parametrize("number", [2, 2.0, True, np.float32(2), np.array(2), torch.tensor(2)])
def test_plain_numbers_are_summed(number):
    one = metrics.partial(number)
    assert one.kind == "sum"
    assert one.values.dtype == np.float64
    assert metrics.result(metrics.merge(one, one)) == 2 * float(number)
    assert isinstance(metrics.result(one), float)


def test_arrays_are_summed_by_element():
    matrix = torch.tensor([[1, 2], [3, 4]])
    summed = total([metrics.partial(matrix), metrics.partial(matrix.numpy())])
    assert np.array_equal(summed, [[2, 4], [6, 8]])


def test_a_partial_result_does_not_change_with_the_array_it_was_made_of():
    array = np.ones(2)
    one = metrics.partial(array)
    array[:] = 5
    assert one.values.tolist() == [1, 1]


def test_a_partial_result_passes_as_it_is():
    one = metrics.mean([1.0])
    assert metrics.partial(one) is one


@pytest.mark.parametrize("value", ["0.5", None, {"a": 1}, [[1], [1, 2]], object()])
def test_what_is_no_metric_is_refused(value):
    with pytest.raises(DataError):
        metrics.partial(value)


# -- merging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (metrics.partial(1.0), metrics.mean([1.0]), "'sum' in one batch and a 'mean'"),
        (metrics.partial([1.0]), metrics.partial([1.0, 2.0]), r"shape \(1,\) in one batch and \(2,\)"),
        (Partial("max", np.zeros(1)), Partial("max", np.zeros(1)), "no metric of the kind 'max'"),
        (Partial("mean", np.zeros(3)), Partial("mean", np.zeros(3)), r"cannot have values of shape \(3,\)"),
        (Partial("auc", np.zeros(3)), Partial("auc", np.zeros((3, 1))), r"cannot have values of shape \(3,\)"),
    ],
)
def test_what_does_not_belong_together_is_not_merged(a, b, sentence):
    with pytest.raises(DataError, match=sentence):
        metrics.merge(a, b)


@given(st.lists(st.tuples(st.floats(width=32, allow_nan=False), st.booleans()), max_size=60), st.integers(0, 60))
def test_merging_areas_is_exact_and_in_any_order(samples, cut):
    scores, labels = np.array([s for s, _ in samples]), np.array([label for _, label in samples], bool)
    whole = metrics.auc(scores, labels)
    head, tail = metrics.auc(scores[:cut], labels[:cut]), metrics.auc(scores[cut:], labels[cut:])
    for merged in (metrics.merge(head, tail), metrics.merge(tail, head)):
        assert np.array_equal(merged.values, whole.values)
    assert whole.values[1:].sum() == len(samples)
    assert np.all(np.diff(whole.values[0]) > 0)


# -- auc ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", ["logits", "probabilities", "narrow", "tied", "float64", "huge"])
def test_auc_is_within_a_ten_thousandth_of_the_exact_one(spread, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 20_000)
    logits = rng.normal(size=20_000) + labels
    scores = {
        "logits": logits.astype(np.float32),
        "probabilities": (1 / (1 + np.exp(-logits))).astype(np.float32),
        "narrow": (0.5 + 0.02 * logits).astype(np.float32),
        "tied": np.round(logits).astype(np.float32),
        "float64": logits,
        "huge": np.sign(logits) * np.exp(np.abs(logits) * 10),
    }[spread]
    parts = [metrics.auc(torch.from_numpy(s), y) for s, y in zip(np.split(scores, 8), np.split(labels, 8), strict=True)]
    assert total(parts) == pytest.approx(exact_auc(scores, labels), abs=1e-4 if spread != "tied" else 1e-12)


def test_auc_of_few_scores_is_exact():
    assert metrics.result(metrics.auc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])) == 0.75
    assert metrics.result(metrics.auc([1, 2, 3], [0, 1, 1])) == 1.0
    assert metrics.result(metrics.auc([1, 1, 1], [0, 1, 1])) == 0.5
    assert metrics.result(metrics.auc([-math.inf, -1e30, -1e-30, 1e-30, 1e30, math.inf], [0, 0, 0, 1, 1, 1])) == 1.0


def test_minus_zero_ties_with_zero():
    assert metrics.result(metrics.auc([0.0, -0.0], [0, 1])) == 0.5


def test_auc_of_one_class_or_of_nothing_is_nan():
    for scores, labels in (([1.0, 2.0], [1, 1]), ([1.0], [0]), ([], [])):
        assert math.isnan(metrics.result(metrics.auc(scores, labels)))


def test_auc_takes_a_column_of_scores_and_boolean_labels():
    scores = torch.tensor([[0.1], [0.9]], requires_grad=True)
    assert metrics.result(metrics.auc(scores, torch.tensor([False, True]))) == 1.0


@pytest.mark.parametrize(
    ("scores", "labels", "sentence"),
    [
        ([float("nan")], [1], "a score is nan"),
        ([0.5], [2], "labels must be 0 or 1"),
        ([0.5], [float("nan")], "labels must be 0 or 1"),
        ([0.5, 0.6], [1], "2 scores and 1 labels"),
        (["a"], [1], "scores"),
    ],
)
def test_wrong_scores_and_labels_are_refused(scores, labels, sentence):
    with pytest.raises(DataError, match=sentence):
        metrics.auc(scores, labels)
