"""Update rules, for rows `[value | state]` of an arena and for flat dense values.

Every function is elementwise: an element's result depends on nothing but that element's numbers.
Formulas and their sources are in `optim.py`; factors that need powers are computed in plain Python by the caller.

Each operation is rounded where torch's CPU kernels round it, products and sums that torch fuses included (`fused`), so
SGD has torch's bits. The other rules differ from torch only by its square root, which is not always the nearest
float32 (`tests/numerics/test_rules.py`: with a correctly rounded root in torch all bits are the same).
"""

import numpy as np

from evergrad.kernels.arrays import Floats, Keys, Rows
from evergrad.kernels.initial import fill_row
from evergrad.kernels.jit import f32, f64, i64, inline, kernel, prefetch, reads, slicing, u64, void, writes

Number = float | np.float32

_AHEAD = 32
_LINE = 16


@inline
def prefetch_span(array: Floats, start: int, size: int) -> None:
    """Start loading `array[start:start + size]`."""
    for at in range(start, start + size, _LINE):
        prefetch(array, at)
    prefetch(array, start + size - 1)


@inline
def fused(a: Number, b: Number, c: Number) -> np.float32:
    """Multiply and add, rounded once: the product is exact in float64.

    The sum is rounded twice and so half a unit off once in about 2**29 cases, the same on every machine.
    """
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


@slicing
def part(arena: Floats, row: int, number: int, dim: int, parts: int) -> Floats:
    """Slice one of the `parts` of a row: its value is part 0, then comes its state.

    A slice, not an offset: its elements are then counted from zero, without which the loops are not vectorized.
    """
    start = (row * parts + number) * dim
    return arena[start : start + dim]


# -- rows --------------------------------------------------------------------------------------------------------------


@kernel(void, writes(f32), i64, i64, reads(i64), reads(i64), i64, f64, f64, u64, f32)
def make_rows(
    arena: Floats,
    stride: int,
    dim: int,
    rows: Rows,
    keys: Keys,
    kind: int,
    a: float,
    b: float,
    seed: np.uint64,
    state: float,
) -> None:
    """Write initial value and initial state of the `rows` made for `keys`."""
    for i in range(keys.size):
        start = rows[i] * stride
        fill_row(arena[start : start + dim], keys[i], kind, a, b, seed)
        arena[start + dim : start + stride] = state


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32)
def sgd_rows(arena: Floats, rows: Rows, grads: Floats, lr: float) -> None:
    """SGD once for each of the different `rows`."""
    n, dim = grads.shape
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_span(arena, rows[i + _AHEAD] * dim, dim)
        value = part(arena, rows[i], 0, dim, 1)
        grad = grads[i]
        for c in range(dim):
            value[c] = fused(-lr, grad[c], value[c])


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32)
def adagrad_rows(arena: Floats, rows: Rows, grads: Floats, lr: float, eps: float) -> None:
    """Adagrad once for each of the different `rows`."""
    n, dim = grads.shape
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_span(arena, rows[i + _AHEAD] * 2 * dim, 2 * dim)
        value, state = part(arena, rows[i], 0, dim, 2), part(arena, rows[i], 1, dim, 2)
        grad = grads[i]
        for c in range(dim):
            g = grad[c]
            s = state[c] + g * g
            state[c] = s
            value[c] = fused(-lr, g / (np.sqrt(s) + eps), value[c])


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32, f32, f32)
def adam_rows(
    arena: Floats, rows: Rows, grads: Floats, step_size: float, rest1: float, rest2: float, eps: float
) -> None:
    """Adam as `torch.optim.SparseAdam` once for each of the different `rows`; `rest` is 1 - beta."""
    n, dim = grads.shape
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_span(arena, rows[i + _AHEAD] * 3 * dim, 3 * dim)
        value, first, second = (
            part(arena, rows[i], 0, dim, 3), part(arena, rows[i], 1, dim, 3), part(arena, rows[i], 2, dim, 3),
        )  # fmt: skip
        grad = grads[i]
        for c in range(dim):
            g = grad[c]
            m = first[c] + (g - first[c]) * rest1
            v = second[c] + (g * g - second[c]) * rest2
            first[c] = m
            second[c] = v
            value[c] -= step_size * (m / (np.sqrt(v) + eps))


# -- dense -------------------------------------------------------------------------------------------------------------


@kernel(void, writes(f32), reads(f32), f32)
def sgd_dense(values: Floats, grads: Floats, lr: float) -> None:
    """SGD on flat values."""
    for i in range(values.size):
        values[i] = fused(-lr, grads[i], values[i])


@kernel(void, writes(f32), writes(f32), reads(f32), f32, f32)
def adagrad_dense(values: Floats, sums: Floats, grads: Floats, lr: float, eps: float) -> None:
    """Adagrad on flat values."""
    for i in range(values.size):
        g = grads[i]
        sums[i] = fused(g, g, sums[i])
        values[i] -= lr * g / (np.sqrt(sums[i]) + eps)


@kernel(void, writes(f32), writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, f32, f32)
def adam_dense(
    values: Floats,
    firsts: Floats,
    seconds: Floats,
    grads: Floats,
    step_size: float,
    rest1: float,
    beta2: float,
    rest2: float,
    root2: float,
    eps: float,
) -> None:
    """Adam as `torch.optim.Adam` on flat values; `root2` is sqrt(1 - beta2**t)."""
    for i in range(values.size):
        g = grads[i]
        m = fused(rest1, g - firsts[i], firsts[i])
        v = fused(rest2 * g, g, seconds[i] * beta2)
        firsts[i] = m
        seconds[i] = v
        values[i] -= step_size * m / (np.sqrt(v) / root2 + eps)
