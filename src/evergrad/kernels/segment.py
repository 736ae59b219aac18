"""Sums of the gradients of equal rows, for the backward pass of lookups."""

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Integers
from evergrad.kernels.hashing import sum_by_inverse
from evergrad.kernels.jit import f32, f64, flag, i64, kernel, reads, void, writes

IN_CACHE_BYTES = 1 << 19
"""Sums that take less are made in place: they stay in the cache of a core."""


@kernel(void, reads(i64), reads(f32, 2), writes(f64, 2), writes(f32, 2))
def _sum_in_place(row: Integers, grads: Floats, sums: NDArray[np.float64], rounded: Floats) -> None:
    n, dim = grads.shape
    for i in range(n):
        into, grad = sums[row[i]], grads[i]
        for c in range(dim):
            into[c] += np.float64(grad[c])
    for j in range(sums.shape[0]):
        for c in range(dim):
            rounded[j, c] = np.float32(sums[j, c])


def sum_rows(row: Integers, grads: Floats, rows: int) -> Floats:
    """The sum of `grads[i]` over all i with `row[i] == j`, for each j below `rows`.

    Args:
        row: shape (n,), each below `rows`.
        grads: shape (n, dim).
        rows: how many sums.
    Returns:
        Shape (rows, dim): each sum taken in order of position in float64 and rounded once; zeros where nothing falls.
    """
    dim = grads.shape[1]
    if 8 * rows * dim > IN_CACHE_BYTES:
        return sum_by_inverse(row, grads, rows)
    rounded = np.empty((rows, dim), np.float32)
    _sum_in_place(row, grads, np.zeros((rows, dim)), rounded)
    return rounded


@kernel(void, reads(i64), reads(i64), reads(f32, 2), flag, i64, writes(f64, 2), writes(f32, 2))
def _sum_bags(
    row: Integers,
    starts: Integers,
    grads: Floats,
    is_mean: bool,
    padding: int,
    sums: NDArray[np.float64],
    rounded: Floats,
) -> None:
    bags, dim = grads.shape
    for bag in range(bags):
        count = 0
        for i in range(starts[bag], starts[bag + 1]):
            count += row[i] != padding
        share = 1.0 / count if is_mean and count else 1.0
        grad = grads[bag]
        for i in range(starts[bag], starts[bag + 1]):
            if row[i] != padding:
                into = sums[row[i]]
                for c in range(dim):
                    into[c] += np.float64(grad[c]) * share
    for j in range(sums.shape[0]):
        for c in range(dim):
            rounded[j, c] = np.float32(sums[j, c])


def sum_bags(row: Integers, starts: Integers, grads: Floats, rows: int, is_mean: bool, padding: int) -> Floats:
    """The gradient of rows from those of the sums or means of bags of them.

    Args:
        row: shape (n,), each below `rows`: the rows of all bags, one after the other.
        starts: shape (bags + 1,): bag b holds `row[starts[b]:starts[b + 1]]`.
        grads: shape (bags, dim).
        rows: how many rows there are.
        is_mean: whether bags are means of their rows.
        padding: a row that belongs to no bag, wherever it stands; -1: none.
    Returns:
        Shape (rows, dim): summed in order of position in float64 and rounded once.
    """
    within, shape = np.clip(starts, 0, row.size), (rows, grads.shape[1])
    rounded = np.empty(shape, np.float32)
    _sum_bags(row, within, grads, is_mean, padding, np.zeros(shape), rounded)
    return rounded
