"""Sums of the gradients of equal rows, for the backward pass of lookups."""

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Integers
from evergrad.kernels.hashing import sum_by_inverse
from evergrad.kernels.jit import f32, f64, i64, making_kernel, reads, writes

IN_CACHE_BYTES = 1 << 19
"""Sums that take less are made in place: they stay in the cache of a core."""


@making_kernel(writes(f32, 2), reads(i64), reads(f32, 2), writes(f64, 2))
def _sum_in_place(row: Integers, grads: Floats, sums: NDArray[np.float64]) -> Floats:
    n, dim = grads.shape
    for i in range(n):
        into, grad = sums[row[i]], grads[i]
        for c in range(dim):
            into[c] += np.float64(grad[c])
    rounded = np.empty(sums.shape, np.float32)
    for j in range(sums.shape[0]):
        for c in range(dim):
            rounded[j, c] = np.float32(sums[j, c])
    return rounded


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
    return _sum_in_place(row, grads, np.zeros((rows, dim)))
