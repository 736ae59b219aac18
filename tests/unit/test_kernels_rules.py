"""Rules on rows of an arena of every length: sixteen numbers at once and what remains."""

import numpy as np
import pytest

from evergrad.kernels.gather import copy_rows, empty_rows
from evergrad.kernels.half import DTYPES, as_seen, as_sent, decoded, encoded
from evergrad.optim import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from evergrad.pserver.rules import apply_rows

ELEMENTWISE = [
    SGD(weight_decay=0.1),
    SGD(momentum=0.9, dampening=0.5),
    SGD(momentum=0.9, nesterov=True),
    Adagrad(weight_decay=0.1),
    Adam(),
    AdamW(),
    FTRL(l1=0.1),
    FTRL(l1=0.1, lr_power=-0.6),
]
DIMS = [1, 3, 15, 16, 17, 31, 32, 33, 48, 50]
ROWS = 40
MET = np.random.default_rng(0).permutation(ROWS)[:21]


def values_of(rule, dim, grads, *, steps=3):
    """The rows after some steps of the first `dim` columns of `grads`."""
    spec = rule.spec()
    width = spec.row_width(dim)
    arena = np.full((ROWS, width), spec.initial_state, np.float32)
    arena[:, :dim] = np.random.default_rng(1).standard_normal((ROWS, 50)).astype(np.float32)[:, :dim]
    before = arena.copy()
    for step in range(steps):
        apply_rows(spec, arena.reshape(-1), MET, np.ascontiguousarray(grads[step][:, :dim]), 0.1, step + 1)
    others = np.setdiff1d(np.arange(ROWS), MET)
    assert arena[others].tobytes() == before[others].tobytes()
    return arena[:, :dim]


def some_grads(steps=3, seed=2):
    return np.random.default_rng(seed).standard_normal((steps, MET.size, 50)).astype(np.float32)


@pytest.mark.parametrize("rule", ELEMENTWISE, ids=repr)
@pytest.mark.parametrize("dim", DIMS)
def test_a_column_does_not_depend_on_how_many_there_are_and_no_other_row_is_touched(rule, dim):
    grads = some_grads()
    assert values_of(rule, dim, grads).tobytes() == np.ascontiguousarray(values_of(rule, 50, grads)[:, :dim]).tobytes()


@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize("count", [1, 15, 16, 17, 21])
@pytest.mark.parametrize("dim", DIMS)
def test_the_squares_of_a_row_are_summed_in_sixteen_sums_in_float64_and_those_in_halves(dim, count, decay):
    rng = np.random.default_rng(dim)
    arena = rng.standard_normal((ROWS, dim + 1)).astype(np.float32)
    arena[:, dim] = rng.random(ROWS)
    grads = (rng.standard_normal((count, dim)) * 1e3 ** rng.integers(-3, 3, (count, 1))).astype(np.float32)
    expected = arena.copy()
    for row, grad in zip(MET[:count], grads, strict=True):
        # a quarter of a number is exact, so the sum is rounded once, as by a fused multiply-add
        g = grad + np.float32(decay) * expected[row, :dim] if decay else grad
        sums = [0.0] * 16
        for column, x in enumerate(g.astype(np.float64)):
            sums[column % 16] += x * x
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
        expected[row, dim] = np.float32(np.float64(expected[row, dim]) + sums[0] / dim)
    apply_rows(RowWiseAdagrad(weight_decay=decay).spec(), arena.reshape(-1), MET[:count], grads, 0.1, 1)
    assert arena[:, dim].tobytes() == expected[:, dim].tobytes()


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", [*ELEMENTWISE, RowWiseAdagrad(weight_decay=0.1)], ids=repr)
@pytest.mark.parametrize("dim", [3, 16, 33])
def test_gradients_of_sixteen_bits_count_as_the_numbers_they_are(kind, rule, dim):
    spec = rule.spec()
    halves = encoded(np.ascontiguousarray(some_grads()[0][:, :dim]), kind)
    arenas = []
    for grads in (as_seen(halves, kind), decoded(halves, kind)):
        arena = np.full((ROWS, spec.row_width(dim)), spec.initial_state, np.float32)
        arena[:, :dim] = 0.5
        apply_rows(spec, arena.reshape(-1), MET, grads, 0.1, 1)
        arenas.append(arena.tobytes())
    assert arenas[0] == arenas[1]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_copied_into_the_type_of_the_wire_and_missing_ones_are_left(kind, dim):
    arena = np.random.default_rng(3).standard_normal((ROWS, 2 * dim)).astype(np.float32)
    rows = np.array([5, -1, 0, ROWS - 1, -7, 5])
    out = empty_rows(rows.size, dim, DTYPES[kind])
    assert out.ctypes.data % 64 == 0
    out[:] = 3
    assert copy_rows(arena.reshape(-1), 2 * dim, rows, out) == 2
    found = rows >= 0
    expected = encoded(np.ascontiguousarray(arena[rows[found], :dim]), kind)
    assert as_sent(out)[found].tobytes() == expected.tobytes()
    assert (out[~found] == 3).all()
