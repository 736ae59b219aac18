"""Rows out of an arena, in the type that the job's wire has."""

import numpy as np

from evergrad.kernels.arrays import Floats, Rows
from evergrad.kernels.jit import f32, i64, inline, kernel, reads, writes
from evergrad.kernels.lanes import WIRE, Count, Wired, load, over, prefetch_row, store

_AHEAD = 32
_LINE_BYTES = 64


def empty_rows(count: int, dim: int, dtype: type[np.generic]) -> Wired:
    """Room for so many rows, beginning with a cache line: writing lines that lie across two takes a third longer."""
    size = count * dim * np.dtype(dtype).itemsize
    room = np.empty(size + _LINE_BYTES, np.uint8)
    start = -room.ctypes.data % _LINE_BYTES
    return room[start : start + size].view(dtype).reshape(count, dim)


@inline
def _copy(at: int, count: Count, arena: Floats, start: int, out: Wired, to: int) -> None:
    store(out, to + at, count, load(arena, start + at, count))


@kernel(i64, reads(f32), i64, reads(i64), tuple(writes(dtype, 2) for dtype in WIRE))
def copy_rows(arena: Floats, stride: int, rows: Rows, out: Wired) -> int:
    """Copy the values of `rows` that are not negative; returns how many are negative."""
    n, dim = out.shape
    flat = out.reshape(-1)
    missing = 0
    for i in range(-_AHEAD, n):
        if i + _AHEAD < n:
            prefetch_row(arena, rows[i + _AHEAD] * stride, dim, stride)
        if i >= 0:
            if rows[i] < 0:
                missing += 1
            else:
                over(_copy, dim, (arena, rows[i] * stride, flat, i * dim))
    return missing
