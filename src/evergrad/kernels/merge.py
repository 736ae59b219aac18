"""Sums over the tasks of a step, and checks of what is summed."""

import numpy as np
from numpy.typing import NDArray

from evergrad.kernels.arrays import Floats, Numbers
from evergrad.kernels.jit import f32, f64, flag, i32, i64, kernel, making_kernel, reads, void, writes


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


@kernel(void, writes(f64, 2), reads(i32), reads(f32, 2), f64)
def add_rows(sums: Numbers, numbers: NDArray[np.int32], grads: Floats, samples: float) -> None:
    """`sums[numbers[i]] += samples * grads[i]`, in order."""
    for i in range(numbers.size):
        for c in range(sums.shape[1]):
            sums[numbers[i], c] += samples * np.float64(grads[i, c])


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
