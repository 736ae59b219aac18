"""Sums over the tasks of a step, and checks of what is summed."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Numbers, Rows
from evergrad.kernels.hashing import unique
from evergrad.kernels.jit import f32, f64, flag, i32, i64, inline, kernel, making_kernel, prefetch, reads, void, writes
from evergrad.kernels.lanes import (
    GRADS,
    WIDTH,
    WIRE,
    Count,
    Wired,
    add_products,
    fused,
    is_any,
    load,
    over,
    quotient,
    store,
)

_AHEAD = 16
_LINE = 8
"""Sums in a cache line."""

RowPart = tuple[NDArray[np.int64], Wired, int]
"""What one task contributes to a table: keys, their gradients (n, dim) as kernels see the wire's, samples."""


@kernel(flag, tuple(reads(dtype) for dtype in WIRE))
def all_finite(numbers: Wired) -> bool:
    """Whether none is NaN or infinite: of all numbers only these times zero are not zero."""
    total = load(numbers, 0, 0)
    whole = numbers.size // WIDTH * WIDTH
    for at in range(0, whole, WIDTH):
        total = fused(load(numbers, at, None), 0.0, total)
    total = fused(load(numbers, whole, numbers.size - whole), 0.0, total)
    return not is_any(total != 0.0)


@making_kernel(flag, reads(i64))
def has_duplicates(rows: Rows) -> bool:
    """Whether two numbers, none of them negative, are the same; said of some that are 2**32 apart, too.

    Cost: one probe of a scratch table each.
    """
    size = 16
    while size < 4 * rows.size:
        size *= 2
    mask = size - 1
    table = np.zeros(size, np.int32)
    for i in range(rows.size):
        mark = np.int32(rows[i] + 1)
        at = rows[i] & mask
        while table[at] != 0:
            if table[at] == mark:
                return True
            at = (at + 1) & mask
        table[at] = mark
    return False


@inline
def _add(at: int, count: Count, sums: Numbers, to: int, grads: Wired, start: int, samples: float) -> None:
    add_products(sums, to + at, count, load(grads, start + at, count), samples)


@inline
def _divide(
    at: int, count: Count, means: Floats, to: int, grads: Wired, start: int, samples: float, total: float
) -> None:
    store(means, to + at, count, quotient(load(grads, start + at, count), samples, total))


@kernel(void, writes(f64, 2), reads(i32), reads(i32), GRADS, f64, f64, writes(f32, 2))
def add_rows(
    sums: Numbers,
    numbers: NDArray[np.int32],
    shared: NDArray[np.int32],
    grads: Wired,
    samples: float,
    total: float,
    means: Floats,
) -> None:
    """Add `samples * grads[i]` to the sum of key `numbers[i]`, in order.

    The sum of a key that stands once in all parts is not kept: its mean is written at once, to the bit what a sum from
    zero, divided, would be. `shared[j]` is the number of key j's sum, negative for such a key.
    """
    dim = means.shape[1]
    flat, flat_sums, flat_means = grads.reshape(-1), sums.reshape(-1), means.reshape(-1)
    for i in range(numbers.size):
        if i + _AHEAD < numbers.size:
            for at in range(0, dim, _LINE):
                prefetch(flat_sums, dim * shared[numbers[i + _AHEAD]] + at)
        at = shared[numbers[i]]
        if at < 0:
            over(_divide, dim, (flat_means, dim * numbers[i], flat, i * dim, samples, total))
        else:
            over(_add, dim, (flat_sums, dim * at, flat, i * dim, samples))


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
