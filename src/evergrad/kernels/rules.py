"""Rows `[value | state]` of an arena: reading, making, and the update rules.

Every rule is elementwise, but for the sum in RowWiseAdagrad, which goes through one row in order: a row's result
depends on nothing but that row's numbers. Formulas and their sources are in `optim.py`; factors that need powers are
computed in plain Python by the caller (`pserver/rules.py`).

SGD has torch's bits. The other rules differ from torch only by its square root, which is not always the nearest
float32 (`tests/numerics/test_rules.py`: with a correctly rounded root in torch all bits are the same).
"""

import numpy as np

from evergrad.kernels.arrays import Floats, Keys, Rows
from evergrad.kernels.initial import FIRST, SCRATCH, First, Scratch, fill_row, write_tails
from evergrad.kernels.jit import f32, f64, flag, fused, i64, inline, kernel, prefetch, reads, slicing, void, writes
from evergrad.kernels.spans import decayed, descend, descend_with_momentum, ftrl, ftrl_of_power

_AHEAD = 32
_LINE = 16


@inline
def prefetch_span(array: Floats, start: int, size: int) -> None:
    """Start loading `array[start:start + size]`."""
    for at in range(start, start + size, _LINE):
        prefetch(array, at)
    prefetch(array, start + size - 1)


@inline
def prefetch_ahead(arena: Floats, rows: Rows, i: int, stride: int) -> None:
    """Start loading the row that will be needed a little after row `i` of `rows`."""
    if i + _AHEAD < rows.size:
        prefetch_span(arena, rows[i + _AHEAD] * stride, stride)


@slicing
def part(arena: Floats, start: int, number: int, dim: int) -> Floats:
    """Slice `dim` elements of the row that begins at `start`: its value is part 0, then comes its state.

    A slice, not an offset: its elements are then counted from zero, without which the loops are not vectorized.
    """
    begin = start + number * dim
    return arena[begin : begin + dim]


@kernel(void, writes(f32), i64, i64, reads(i64), reads(i64), FIRST, SCRATCH, f32)
def make_rows(
    arena: Floats, stride: int, dim: int, rows: Rows, keys: Keys, first: First, scratch: Scratch, state: float
) -> None:
    """Write initial value and initial state of the `rows` made for `keys`."""
    pending = 0
    for i in range(keys.size):
        start = rows[i] * stride
        pending = fill_row(arena, start, dim, keys[i], first, scratch, pending)
        arena[start + dim : start + stride] = state
    write_tails(arena, first, scratch, pending)


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32)
def sgd_rows(arena: Floats, rows: Rows, grads: Floats, lr: float, decay: float) -> None:
    """SGD without momentum once for each of the different `rows`."""
    n, dim = grads.shape
    for i in range(n):
        prefetch_ahead(arena, rows, i, dim)
        descend(part(arena, rows[i] * dim, 0, dim), grads[i], lr, decay)


@kernel(void, writes(f32), i64, reads(i64), reads(f32, 2), f32, f32, f32, f32, flag)
def momentum_rows(
    arena: Floats, stride: int, rows: Rows, grads: Floats,
    lr: float, decay: float, momentum: float, share: float, nesterov: bool,
) -> None:  # fmt: skip
    """SGD with momentum once for each of the different `rows`; `share` is 1 - dampening.

    A row of 2 * dim + 1 floats says in the last whether it had a gradient; one of 2 * dim is not dampened.
    """
    n, dim = grads.shape
    for i in range(n):
        prefetch_ahead(arena, rows, i, stride)
        start = rows[i] * stride
        is_first = stride > 2 * dim and arena[start + 2 * dim] == 0.0
        if is_first:
            arena[start + 2 * dim] = 1.0
        value, buffer = part(arena, start, 0, dim), part(arena, start, 1, dim)
        now = np.float32(1.0) if is_first else share
        descend_with_momentum(value, buffer, grads[i], lr, decay, momentum, now, nesterov)


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32, f32)
def adagrad_rows(arena: Floats, rows: Rows, grads: Floats, lr: float, decay: float, eps: float) -> None:
    """Adagrad once for each of the different `rows`."""
    n, dim = grads.shape
    for i in range(n):
        prefetch_ahead(arena, rows, i, 2 * dim)
        start = rows[i] * 2 * dim
        value, state = part(arena, start, 0, dim), part(arena, start, 1, dim)
        grad = grads[i]
        for c in range(dim):
            g = decayed(grad[c], decay, value[c])
            s = state[c] + g * g
            state[c] = s
            value[c] = fused(-lr, g / (np.sqrt(s) + eps), value[c])


@inline
def square_of(grad: float, decay: float, weight: float) -> float:
    """The square of a gradient with weight decay, exact."""
    g = np.float64(decayed(grad, decay, weight))
    return g * g


@inline
def sums_of_four(
    arena: Floats, rows: Rows, grads: Floats, first: int, decay: float
) -> tuple[float, float, float, float]:
    """Sum the squares of each of the four rows from `first` on, each column by column.

    Four at a time, because one sum waits for itself. Beyond the end it is the last row once more.
    """
    last = rows.size - 1
    i, j, k, m = first, min(first + 1, last), min(first + 2, last), min(first + 3, last)
    dim = grads.shape[1]
    stride = dim + 1
    w, x, y, z = (
        part(arena, rows[i] * stride, 0, dim), part(arena, rows[j] * stride, 0, dim),
        part(arena, rows[k] * stride, 0, dim), part(arena, rows[m] * stride, 0, dim),
    )  # fmt: skip
    e, f, g, h = grads[i], grads[j], grads[k], grads[m]
    a = b = c = d = 0.0
    for n in range(dim):
        a += square_of(e[n], decay, w[n])
        b += square_of(f[n], decay, x[n])
        c += square_of(g[n], decay, y[n])
        d += square_of(h[n], decay, z[n])
    return a, b, c, d


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32, f32)
def rowwise_adagrad_rows(arena: Floats, rows: Rows, grads: Floats, lr: float, decay: float, eps: float) -> None:
    """RowWiseAdagrad once for each of the different `rows`, whose last float is the accumulator."""
    n, dim = grads.shape
    stride = dim + 1
    for first in range(0, n, 4):
        squares = sums_of_four(arena, rows, grads, first, decay)
        for i in range(first, min(first + 4, n)):
            prefetch_ahead(arena, rows, i, stride)
            start = rows[i] * stride
            s = np.float32(np.float64(arena[start + dim]) + squares[i - first] / dim)
            arena[start + dim] = s
            descend(part(arena, start, 0, dim), grads[i], lr / (np.sqrt(s) + eps), decay)


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32, f32, f32, f32, f32)
def adam_rows(
    arena: Floats, rows: Rows, grads: Floats,
    step_size: float, decay: float, keep: float, rest1: float, rest2: float, eps: float,
) -> None:  # fmt: skip
    """Adam as `torch.optim.SparseAdam` once for each of the different `rows`.

    `keep` is what a weight is multiplied by first, `rest` is 1 - beta.
    """
    n, dim = grads.shape
    for i in range(n):
        prefetch_ahead(arena, rows, i, 3 * dim)
        start = rows[i] * 3 * dim
        value, first, second = part(arena, start, 0, dim), part(arena, start, 1, dim), part(arena, start, 2, dim)
        grad = grads[i]
        for c in range(dim):
            g = decayed(grad[c], decay, value[c])
            m = first[c] + (g - first[c]) * rest1
            v = second[c] + (g * g - second[c]) * rest2
            first[c] = m
            second[c] = v
            value[c] = keep * value[c] - step_size * (m / (np.sqrt(v) + eps))


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32, f32, f32, f32)
def ftrl_rows(
    arena: Floats, rows: Rows, grads: Floats, rate: float, beta: float, l1: float, l2: float, initial: float
) -> None:
    """FTRL-Proximal once for each of the different `rows`; `rate` is 1 / lr."""
    n, dim = grads.shape
    for i in range(n):
        prefetch_ahead(arena, rows, i, 3 * dim)
        start = rows[i] * 3 * dim
        value, linear, sums = part(arena, start, 0, dim), part(arena, start, 1, dim), part(arena, start, 2, dim)
        ftrl(value, linear, sums, grads[i], rate, beta, l1, l2, initial)


@kernel(void, writes(f32), reads(i64), reads(f32, 2), f32, f32, f32, f32, f32, f64)
def ftrl_power_rows(
    arena: Floats, rows: Rows, grads: Floats,
    rate: float, beta: float, l1: float, l2: float, initial: float, power: float,
) -> None:  # fmt: skip
    """FTRL-Proximal with another power than 1/2."""
    n, dim = grads.shape
    for i in range(n):
        prefetch_ahead(arena, rows, i, 3 * dim)
        start = rows[i] * 3 * dim
        value, linear, sums = part(arena, start, 0, dim), part(arena, start, 1, dim), part(arena, start, 2, dim)
        ftrl_of_power(value, linear, sums, grads[i], rate, beta, l1, l2, initial, power)
