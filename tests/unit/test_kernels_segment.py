"""Gradients summed by row: all features of a batch at once, in bags, against sums one by one."""

import numpy as np
import pytest

from evergrad.kernels.arrays import address_of
from evergrad.kernels.features import Features
from evergrad.kernels.segment import IN_CACHE, sum_bags, sum_rows


def sums_of(index, grads, tables, dims, rows):
    """The sums of each table."""
    features = Features(np.array([i.size for i in index]), np.array(tables), np.array(dims))
    strides = [0 if g is None else g.strides[0] // 4 for g in grads]
    at = [0 if g is None else address_of(g) for g in grads]
    sums, bounds = sum_rows(
        features, np.array([address_of(i) for i in index]), np.array(rows), np.array(at), np.array(strides)
    )
    assert (bounds[0], bounds[-1]) == (0, sums.size)
    shapes = dict(zip(tables, dims, strict=True))
    return [sums[bounds[t] : bounds[t + 1]].reshape(-1, shapes[t]) for t in sorted(shapes)]


def expected(index, grads, rows, dim):
    sums = np.zeros((rows, dim))
    for i, g in zip(index, grads, strict=True):
        for row, grad in zip(i, g, strict=True):
            if row >= 0:
                sums[row] += grad
    return sums.astype(np.float32)


@pytest.mark.parametrize("rows", [41, IN_CACHE // 5 + 1])
def test_equal_rows_are_summed_in_order_of_position_in_float64_and_rounded_once(rows):
    """Few sums are made in place, many row by row."""
    rng = np.random.default_rng(5)
    index = [rng.integers(-1, 40, 500).astype(np.int32), rng.integers(0, 30, 60).astype(np.int32)]
    grads = [
        (rng.standard_normal((i.size, 5)) * 10.0 ** rng.integers(-9, 9, (i.size, 1))).astype(np.float32) for i in index
    ]
    (sums,) = sums_of(index, grads, [0, 0], [5, 5], [rows])
    assert (sums == expected(index, grads, rows, 5)).all()


def test_tables_are_summed_apart():
    rng = np.random.default_rng(6)
    index = [rng.integers(0, n, 90).astype(np.int32) for n in (4, 7000, 7)]
    grads = [rng.standard_normal((90, dim)).astype(np.float32) for dim in (3, 16, 8)]
    found = sums_of(index, grads, [0, 1, 2], [3, 16, 8], [4, 7000, 7])
    for sums, i, g, n in zip(found, index, grads, (4, 7000, 7), strict=True):
        assert (sums == expected([i], [g], n, g.shape[1])).all()


@pytest.mark.parametrize("rows", [4, IN_CACHE])
def test_slices_of_a_wider_gradient_and_repeated_ones_are_read_where_they_lie(rows):
    wide = np.random.default_rng(7).standard_normal((20, 11)).astype(np.float32)
    index = [np.arange(20, dtype=np.int32) % 4] * 3
    grads = [wide[:, 1:4], wide[:, 8:], np.broadcast_to(wide[0, :3], (20, 3))]
    (sums,) = sums_of(index, grads, [0, 0, 0], [3, 3, 3], [rows])
    assert (sums == expected(index, grads, rows, 3)).all()


@pytest.mark.parametrize("rows", [3, IN_CACHE])
def test_a_feature_without_gradient_adds_nothing(rows):
    index = [np.array([0, 1], np.int32), np.array([1, 2], np.int32)]
    grads = [None, np.ones((2, 2), np.float32)]
    (sums,) = sums_of(index, grads, [0, 0], [2, 2], [rows])
    assert sums[:3].tolist() == [[0, 0], [1, 1], [1, 1]]
    assert not sums[3:].any()


@pytest.mark.parametrize("rows", [1, IN_CACHE])
def test_nothing_to_sum(rows):
    (sums,) = sums_of([np.empty(0, np.int32)], [np.empty((0, 4), np.float32)], [0], [4], [rows])
    assert sums.shape == (rows, 4)
    assert not sums.any()


@pytest.mark.parametrize("is_mean", [False, True])
def test_bags_hand_their_gradient_to_each_of_their_rows_but_padding(is_mean):
    row = np.array([0, 2, -1, 2, 1, -1], np.int64)
    starts = np.array([0, 3, 3, 4, 6])
    grads = np.array([[1.0, 2.0], [9.0, 9.0], [4.0, 8.0], [16.0, 32.0]], np.float32)
    sums = sum_bags(row, starts, grads, 3, is_mean)
    share = 0.5 if is_mean else 1.0
    assert sums.tolist() == [[share * 1, share * 2], [16, 32], [share * 1 + 4, share * 2 + 8]]
