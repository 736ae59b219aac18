"""Sums of the gradients of equal rows, for the backward pass of lookups."""

import numpy as np

from evergrad.kernels.arrays import Floats, Integers, Numbers
from evergrad.kernels.features import ANY, FEATURES, Features
from evergrad.kernels.jit import (
    Integer,
    f32,
    f64,
    flag,
    floats_at,
    i64,
    inline,
    int32s_at,
    kernel,
    prefetch,
    reads,
    void,
    writes,
)

IN_CACHE = 1 << 16
"""So many sums are made in place, in float64: they stay in the cache of a core."""
_AHEAD = 24


@inline
def _sum_in_place(grads: Integer, stride: Integer, index: Integer, count: Integer, dim: Integer, sums: Numbers) -> None:
    """Add gradients, `stride` floats apart, to the sums of their rows."""
    source, numbers = floats_at(grads, ANY), int32s_at(index, count)
    for i in range(count):
        prefetch(source, (i + _AHEAD) * stride)
        prefetch(source, (i + _AHEAD) * stride + dim - 1)
        row = np.int64(numbers[i])
        if row >= 0:
            into, grad = sums[row * dim : row * dim + dim], source[i * stride : i * stride + dim]
            for c in range(dim):
                into[c] += np.float64(grad[c])


@inline
def _sort(
    features: Features, first: Integer, last: Integer, index: Integers, grads: Integers, strides: Integers,
    ends: Integers, order: Integers,
) -> None:  # fmt: skip
    """The addresses of the gradients of features `first` to `last`, sorted by row, and where those of each row end."""
    for f in range(first, last):
        numbers = int32s_at(index[f], features.counts[f])
        for i in range(numbers.size):
            if grads[f] != 0 and numbers[i] >= 0:
                ends[numbers[i] + 1] += 1
    for j in range(ends.size - 1):
        ends[j + 1] += ends[j]
    for f in range(first, last):
        numbers = int32s_at(index[f], features.counts[f])
        for i in range(numbers.size):
            if grads[f] != 0 and numbers[i] >= 0:
                order[ends[numbers[i]]] = grads[f] + 4 * strides[f] * i
                ends[numbers[i]] += 1


@inline
def _sum_in_order(ends: Integers, order: Integers, dim: Integer, row_sum: Numbers, sums: Floats) -> None:
    """Sum up the gradients of each row, row by row."""
    begin = np.int64(0)
    for j in range(ends.size - 1):
        end, into = ends[j], sums[j * dim : j * dim + dim]
        prefetch(floats_at(order[min(begin + 8, np.int64(order.size - 1))], dim), 0)
        if end - begin == 1:
            grad = floats_at(order[begin], dim)
            for c in range(dim):
                into[c] = grad[c]
        else:
            for c in range(dim):
                row_sum[c] = 0.0
            for k in range(begin, end):
                grad = floats_at(order[k], dim)
                for c in range(dim):
                    row_sum[c] += np.float64(grad[c])
            for c in range(dim):
                into[c] = np.float32(row_sum[c])
        begin = end


@kernel(
    void, FEATURES, reads(i64), reads(i64), reads(i64), reads(i64), writes(f64), writes(i64), writes(i64), writes(f32)
)  # fmt: skip
def _sum(
    features: Features, index: Integers, rows: Integers, grads: Integers, strides: Integers,
    scratch: Numbers, ends: Integers, order: Integers, sums: Floats,
) -> None:  # fmt: skip
    first = begin = np.int64(0)
    while first < features.tables.size:
        table, dim = features.tables[first], features.dims[first]
        last = first + 1
        while last < features.tables.size and features.tables[last] == table:
            last += 1
        of_table = sums[begin : begin + rows[table] * dim]
        begin += rows[table] * dim
        if of_table.size > IN_CACHE:
            of_rows = ends[: rows[table] + 1]
            for j in range(of_rows.size):
                of_rows[j] = 0
            _sort(features, first, last, index, grads, strides, of_rows, order)
            _sum_in_order(of_rows, order, dim, scratch, of_table)
        else:
            for i in range(of_table.size):
                scratch[i] = 0.0
            for f in range(first, last):
                if grads[f] != 0:
                    _sum_in_place(grads[f], strides[f], index[f], features.counts[f], dim, scratch)
            for i in range(of_table.size):
                of_table[i] = np.float32(scratch[i])
        first = last


def sum_rows(
    features: Features, index: Integers, rows: Integers, grads: Integers, strides: Integers
) -> tuple[Floats, Integers]:
    """Sum up the gradients of each row of each table, in order of position in float64, rounded once.

    Args:
        features: what was read.
        index: for each feature the address of the numbers of its rows, int32; negative: none.
        rows: so many rows each table has.
        grads: for each feature the address of the gradient of what it read, float32; 0: there is none.
        strides: for each feature how many floats lie from one position's gradient to the next one's.
    Returns:
        The sums of all tables one after the other, flat, zeros for a row without gradient; and where those of each
        table begin, and the end of the last.
    """
    sizes = np.zeros(rows.size, np.int64)
    sizes[features.tables] = rows[features.tables] * features.dims
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    sums = np.empty(int(bounds[-1]), np.float32)
    largest = int(sizes.max())
    scratch = np.empty(max(min(largest, IN_CACHE), int(features.dims.max())))
    is_large = largest > IN_CACHE
    ends = np.empty(int(rows.max()) + 1 if is_large else 0, np.int64)
    order = np.zeros(int(features.counts.sum()) + 1 if is_large else 0, np.int64)
    _sum(features, index, rows, grads, strides, scratch, ends, order, sums)
    return sums, bounds


@kernel(void, reads(i64), reads(i64), reads(f32, 2), flag, writes(f64, 2), writes(f32, 2))
def _sum_bags(
    row: Integers,
    starts: Integers,
    grads: Floats,
    is_mean: bool,
    sums: Numbers,
    rounded: Floats,
) -> None:
    bags, dim = grads.shape
    for bag in range(bags):
        count = 0
        for i in range(starts[bag], starts[bag + 1]):
            count += row[i] >= 0
        share = 1.0 / count if is_mean and count else 1.0
        grad = grads[bag]
        for i in range(starts[bag], starts[bag + 1]):
            if row[i] >= 0:
                into = sums[row[i]]
                for c in range(dim):
                    into[c] += np.float64(grad[c]) * share
    for j in range(sums.shape[0]):
        for c in range(dim):
            rounded[j, c] = np.float32(sums[j, c])


def sum_bags(row: Integers, starts: Integers, grads: Floats, rows: int, is_mean: bool) -> Floats:
    """The gradient of rows from those of the sums or means of bags of them.

    Args:
        row: shape (n,), each below `rows`: the rows of all bags, one after the other; negative: it belongs to no bag.
        starts: shape (bags + 1,): bag b holds `row[starts[b]:starts[b + 1]]`.
        grads: shape (bags, dim).
        rows: how many rows there are.
        is_mean: whether bags are means of their rows.
    Returns:
        Shape (rows, dim): summed in order of position in float64 and rounded once.
    """
    within, shape = np.clip(starts, 0, row.size), (rows, grads.shape[1])
    rounded = np.empty(shape, np.float32)
    _sum_bags(row, within, grads, is_mean, np.zeros(shape), rounded)
    return rounded
