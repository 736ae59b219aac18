"""Sums over the tasks of a step, and checks of what is summed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Numbers
from evergrad.kernels.hashing import unique
from evergrad.kernels.jit import f32, f64, flag, i32, i64, kernel, making_kernel, reads, void, writes

RowPart = tuple[NDArray[np.int64], Floats, int]
"""What one task contributes to a table: keys, their gradients (n, dim), samples."""


def all_finite(array: Floats) -> bool:
    """Whether no element is NaN or infinite. Cost: one pass at the speed of memory, a byte of scratch an element."""
    return bool(np.isfinite(array).all())


@making_kernel(flag, reads(i64))
def has_duplicates(rows: NDArray[np.int64]) -> bool:
    """Whether two numbers of zero or more are the same. Cost: one probe of a scratch table each."""
    size = 16
    while size < 2 * rows.size:
        size *= 2
    mask = size - 1
    table = np.full(size, -1, np.int64)
    for i in range(rows.size):
        at = rows[i] & mask
        while table[at] >= 0:
            if table[at] == rows[i]:
                return True
            at = (at + 1) & mask
        table[at] = rows[i]
    return False


@kernel(void, writes(f64, 2), reads(i32), reads(i32), reads(f32, 2), f64, f64, writes(f32, 2))
def add_rows(
    sums: Numbers,
    numbers: NDArray[np.int32],
    shared: NDArray[np.int32],
    grads: Floats,
    samples: float,
    total: float,
    means: Floats,
) -> None:
    """Add `samples * grads[i]` to the sum of key `numbers[i]`, in order.

    The sum of a key that stands once in all parts is not kept: its mean is written at once, to the bit what a sum from
    zero, divided, would be. `shared[j]` is the number of key j's sum, negative for such a key.
    """
    dim = means.shape[1]
    for i in range(numbers.size):
        grad = grads[i]
        at = shared[numbers[i]]
        if at < 0:
            mean = means[numbers[i]]
            for c in range(dim):
                mean[c] = np.float32((0.0 + samples * np.float64(grad[c])) / total)
        else:
            row = sums[at]
            for c in range(dim):
                row[c] += samples * np.float64(grad[c])


@kernel(void, reads(f64, 2), reads(i32), f64, writes(f32, 2))
def divide_rows(sums: Numbers, shared: NDArray[np.int32], total: float, means: Floats) -> None:
    """Write the means of the keys that have a sum, each rounded once."""
    for j in range(shared.size):
        if shared[j] >= 0:
            row, mean = sums[shared[j]], means[j]
            for c in range(means.shape[1]):
                mean[c] = np.float32(row[c] / total)


def mean_rows(parts: Sequence[RowPart], total: int, dim: int) -> tuple[NDArray[np.int64], Floats]:
    """The different keys of all parts, and for each its sum of samples * gradient over `total`.

    A key's terms are added in the order of the parts in float64, and its mean is rounded once.
    """
    keys, numbers = unique(np.concatenate([np.empty(0, np.int64), *(keys for keys, _, _ in parts)]))
    is_shared = np.bincount(numbers, minlength=keys.size) > 1
    shared = np.where(is_shared, np.cumsum(is_shared) - 1, -1).astype(np.int32)
    sums = np.zeros((int(is_shared.sum()), dim))
    means = np.empty((keys.size, dim), np.float32)
    start = 0
    for part, grads, samples in parts:
        add_rows(sums, numbers[start : start + part.size], shared, grads, samples, total, means)
        start += part.size
    divide_rows(sums, shared, total, means)
    return keys, means


@kernel(void, writes(f64), reads(f32), f64)
def add_flat(sums: Numbers, values: Floats, samples: float) -> None:
    """`sums += samples * values`."""
    for i in range(sums.size):
        sums[i] += samples * np.float64(values[i])


@kernel(void, reads(f64), f64, writes(f32))
def divide(sums: Numbers, total: float, means: Floats) -> None:
    """`means = sums / total`, rounded once to float32."""
    for i in range(sums.size):
        means[i] = np.float32(sums[i] / total)
