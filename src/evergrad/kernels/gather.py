"""Rows out of an arena: those that exist copied, those that do not from their keys."""

from evergrad.kernels.arrays import Floats, Keys, Rows
from evergrad.kernels.initial import FIRST, SCRATCH, First, Scratch, fill_row, write_tails
from evergrad.kernels.jit import f32, i64, kernel, prefetch, reads, void, writes

_AHEAD = 48
_LINE = 16
"""Floats of a cache line."""


@kernel(i64, reads(f32), i64, reads(i64), writes(f32, 2))
def copy_rows(arena: Floats, stride: int, rows: Rows, out: Floats) -> int:
    """Copy the values of `rows` that are not negative; returns how many are negative."""
    n, dim = out.shape
    missing = 0
    for i in range(min(_AHEAD, n)):
        for at in range(0, dim, _LINE):
            prefetch(arena, rows[i] * stride + at)
    for i in range(n):
        if i + _AHEAD < n:
            for at in range(0, dim, _LINE):
                prefetch(arena, rows[i + _AHEAD] * stride + at)
        if rows[i] < 0:
            missing += 1
            continue
        start = rows[i] * stride
        value, to = arena[start : start + dim], out[i]
        for c in range(dim):
            to[c] = value[c]
    return missing


@kernel(void, reads(i64), reads(i64), FIRST, SCRATCH, writes(f32, 2))
def fill_missing(rows: Rows, keys: Keys, first: First, scratch: Scratch, out: Floats) -> None:
    """Write the initial values of the keys whose row is negative."""
    dim = out.shape[1]
    flat, pending = out.reshape(-1), 0
    for i in range(keys.size):
        if rows[i] < 0:
            pending = fill_row(flat, i * dim, dim, keys[i], first, scratch, pending)
    write_tails(flat, first, scratch, pending)
