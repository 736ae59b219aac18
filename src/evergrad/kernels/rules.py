"""Rows `[value | state]` of an arena: reading, making, and the update rules.

Every rule is elementwise, but for the sum in RowWiseAdagrad, which is that of one row: a row's result
depends on nothing but that row's numbers. Formulas and their sources are in `optim.py`; factors that need powers are
computed in plain Python by the caller (`pserver/rules.py`).

SGD has torch's bits. The other rules differ from torch only by its square root, which is not always the nearest
float32 (`tests/numerics/test_rules.py`: with a correctly rounded root in torch all bits are the same).
"""

from typing import NamedTuple

import numpy as np

from evergrad.kernels.arrays import Floats, Keys, Rows
from evergrad.kernels.initial import FIRST, SCRATCH, First, Scratch, fill_row, write_tails
from evergrad.kernels.jit import f32, f64, flag, i64, inline, kernel, reads, void, writes
from evergrad.kernels.lanes import (
    GRADS,
    WIDTH,
    Count,
    Lanes,
    Wired,
    fused,
    load,
    no_sums,
    over,
    prefetch_row,
    root,
    store,
    total,
    with_squares,
)
from evergrad.kernels.spans import decayed, descended, descended_with_momentum, ftrl

_AHEAD = 32


class Row(NamedTuple):
    """A row of an arena and its gradient, for the rules."""

    arena: Floats
    start: int
    """Where its value begins; the parts of its state follow, each as long."""
    dim: int
    grads: Wired
    grad_start: int


@inline
def part(row: Row, which: int, at: int, count: Count) -> Lanes:
    """A line of a row's value, part 0, or of its state."""
    return load(row.arena, row.start + which * row.dim + at, count)


@inline
def put(row: Row, which: int, at: int, count: Count, lanes: Lanes) -> None:
    """Write a line of part 0, 1, ..."""
    store(row.arena, row.start + which * row.dim + at, count, lanes)


@inline
def grad_of(row: Row, at: int, count: Count) -> Lanes:
    """A line of a row's gradient."""
    return load(row.grads, row.grad_start + at, count)


@inline
def prefetch_ahead(arena: Floats, rows: Rows, i: int, stride: int) -> None:
    """Start loading the row that will be needed a little after row `i` of `rows`."""
    if i + _AHEAD < rows.size:
        prefetch_row(arena, rows[i + _AHEAD] * stride, stride, stride)


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


@inline
def _sgd(at: int, count: Count, row: Row, lr: float, decay: float) -> None:
    put(row, 0, at, count, descended(part(row, 0, at, count), grad_of(row, at, count), lr, decay))


@kernel(void, writes(f32), reads(i64), GRADS, f32, f32)
def sgd_rows(arena: Floats, rows: Rows, grads: Wired, lr: float, decay: float) -> None:
    """SGD without momentum once for each of the different `rows`."""
    n, dim = grads.shape
    flat = grads.reshape(-1)
    for i in range(n):
        prefetch_ahead(arena, rows, i, dim)
        over(_sgd, dim, (Row(arena, rows[i] * dim, dim, flat, i * dim), lr, decay))


@inline
def _momentum(
    at: int, count: Count, row: Row, lr: float, decay: float, momentum: float, share: float, nesterov: bool
) -> None:
    value, buffer, grad = part(row, 0, at, count), part(row, 1, at, count), grad_of(row, at, count)
    value, buffer = descended_with_momentum(value, buffer, grad, lr, decay, momentum, share, nesterov)
    put(row, 1, at, count, buffer)
    put(row, 0, at, count, value)


@kernel(void, writes(f32), i64, reads(i64), GRADS, f32, f32, f32, f32, flag)
def momentum_rows(
    arena: Floats, stride: int, rows: Rows, grads: Wired,
    lr: float, decay: float, momentum: float, share: float, nesterov: bool,
) -> None:  # fmt: skip
    """SGD with momentum once for each of the different `rows`; `share` is 1 - dampening.

    A row of 2 * dim + 1 floats says in the last whether it had a gradient; one of 2 * dim is not dampened.
    """
    n, dim = grads.shape
    flat = grads.reshape(-1)
    for i in range(n):
        prefetch_ahead(arena, rows, i, stride)
        start = rows[i] * stride
        is_first = stride > 2 * dim and arena[start + 2 * dim] == 0.0
        if is_first:
            arena[start + 2 * dim] = 1.0
        now = np.float32(1.0) if is_first else share
        over(_momentum, dim, (Row(arena, start, dim, flat, i * dim), lr, decay, momentum, now, nesterov))


@inline
def _adagrad(at: int, count: Count, row: Row, lr: float, decay: float, eps: float) -> None:
    value = part(row, 0, at, count)
    g = decayed(grad_of(row, at, count), decay, value)
    s = part(row, 1, at, count) + g * g
    put(row, 1, at, count, s)
    put(row, 0, at, count, fused(-lr, g / (root(s) + eps), value))


@kernel(void, writes(f32), reads(i64), GRADS, f32, f32, f32)
def adagrad_rows(arena: Floats, rows: Rows, grads: Wired, lr: float, decay: float, eps: float) -> None:
    """Adagrad once for each of the different `rows`."""
    n, dim = grads.shape
    flat = grads.reshape(-1)
    for i in range(n):
        prefetch_ahead(arena, rows, i, 2 * dim)
        over(_adagrad, dim, (Row(arena, rows[i] * 2 * dim, dim, flat, i * dim), lr, decay, eps))


@inline
def _sum_of_squares(row: Row, decay: float) -> float:
    """Of a row's gradient with weight decay: sixteen sums side by side, since one waits for itself, then theirs."""
    rest, sums = row.dim % WIDTH, no_sums()
    for at in range(0, row.dim - rest, WIDTH):
        sums = with_squares(sums, decayed(grad_of(row, at, None), decay, part(row, 0, at, None)))
    if rest:
        at = row.dim - rest
        sums = with_squares(sums, decayed(grad_of(row, at, rest), decay, part(row, 0, at, rest)))
    return total(sums)


@kernel(void, writes(f32), reads(i64), GRADS, f32, f32, f32)
def rowwise_adagrad_rows(arena: Floats, rows: Rows, grads: Wired, lr: float, decay: float, eps: float) -> None:
    """RowWiseAdagrad once for each of the different `rows`, whose last float is the accumulator."""
    n, dim = grads.shape
    flat = grads.reshape(-1)
    for i in range(n):
        prefetch_ahead(arena, rows, i, dim + 1)
        start = rows[i] * (dim + 1)
        row = Row(arena, start, dim, flat, i * dim)
        s = np.float32(np.float64(arena[start + dim]) + _sum_of_squares(row, decay) / dim)
        arena[start + dim] = s
        over(_sgd, dim, (row, lr / (np.sqrt(s) + eps), decay))


@inline
def _adam(
    at: int, count: Count, row: Row, step_size: float, decay: float, keep: float, rest1: float, rest2: float, eps: float
) -> None:
    value, first, second = part(row, 0, at, count), part(row, 1, at, count), part(row, 2, at, count)
    g = decayed(grad_of(row, at, count), decay, value)
    m = first + (g - first) * rest1
    v = second + (g * g - second) * rest2
    put(row, 1, at, count, m)
    put(row, 2, at, count, v)
    put(row, 0, at, count, keep * value - step_size * (m / (root(v) + eps)))


@kernel(void, writes(f32), reads(i64), GRADS, f32, f32, f32, f32, f32, f32)
def adam_rows(
    arena: Floats, rows: Rows, grads: Wired,
    step_size: float, decay: float, keep: float, rest1: float, rest2: float, eps: float,
) -> None:  # fmt: skip
    """Adam as `torch.optim.SparseAdam` once for each of the different `rows`.

    `keep` is what a weight is multiplied by first, `rest` is 1 - beta.
    """
    n, dim = grads.shape
    flat = grads.reshape(-1)
    for i in range(n):
        prefetch_ahead(arena, rows, i, 3 * dim)
        row = Row(arena, rows[i] * 3 * dim, dim, flat, i * dim)
        over(_adam, dim, (row, step_size, decay, keep, rest1, rest2, eps))


@inline
def _ftrl(
    at: int, count: Count, row: Row, rate: float, beta: float, l1: float, l2: float, initial: float, p: float
) -> None:
    value, z, n = part(row, 0, at, count), part(row, 1, at, count), part(row, 2, at, count)
    value, z, n = ftrl(value, z, n, grad_of(row, at, count), rate, beta, l1, l2, initial, p)
    put(row, 1, at, count, z)
    put(row, 2, at, count, n)
    put(row, 0, at, count, value)


@kernel(void, writes(f32), reads(i64), GRADS, f32, f32, f32, f32, f32, f64)
def ftrl_rows(
    arena: Floats, rows: Rows, grads: Wired,
    rate: float, beta: float, l1: float, l2: float, initial: float, p: float,
) -> None:  # fmt: skip
    """FTRL-Proximal once for each of the different `rows`; `rate` is 1 / lr, `p` minus the learning rate's power."""
    n, dim = grads.shape
    flat = grads.reshape(-1)
    for i in range(n):
        prefetch_ahead(arena, rows, i, 3 * dim)
        over(_ftrl, dim, (Row(arena, rows[i] * 3 * dim, dim, flat, i * dim), rate, beta, l1, l2, initial, p))
