"""First values of rows: a pure function of (seed, table, key, column).

Integer hashing and + - * / sqrt on float64 only, so that every machine computes the same bits.
"""

from hashlib import blake2b
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from evergrad.init_rows import Initializer, InitName
from evergrad.kernels.arrays import Floats, Integers, Keys, Numbers
from evergrad.kernels.hashing import mix
from evergrad.kernels.jit import f32, f64, i64, inline, kernel, reads, record, u64, void, writes

_PENDING = 512
ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DROP_TO_52 = np.uint64(12)
_ULP = 2.0**-52
_LN2 = 0.6931471805599453
_SQRT_TWO = 2 * 0.7071067811865476
_FRACTION = (1 << 52) - 1
_ONE = 1023 << 52
MIDDLE = 0.5 - 0.02425


class First(NamedTuple):
    """What kernels know of a table's initializer, as `first_values` makes it."""

    kind: int
    seed: np.uint64
    a: float = 0.0
    """The constant, the low end, or the mean."""
    b: float = 0.0
    """The high end or the standard deviation; below zero for a mirrored distribution."""
    start: float = 0.0
    """Of normal numbers: the probability at which the part of the distribution that is drawn begins."""
    width: float = 1.0
    """How much of it is drawn."""
    low: float = -inf
    """The least number."""
    high: float = inf
    """The greatest number."""


class Scratch(NamedTuple):
    """What filling rows with normal numbers needs to remember."""

    drawn: Numbers
    """The probabilities of one row, less 1/2."""
    places: Integers
    """Where numbers of the tails belong, which are written many at a time,"""
    tails: Numbers
    """and their probabilities, less 1/2."""


SCRATCH = record(Scratch, writes(f64), writes(i64), writes(f64))
FIRST = record(First, i64, u64, f64, f64, f64, f64, f64, f64)


def first_values(initializer: Initializer, dim: int, seed: int) -> First:
    """The initializer of a table for kernels; `seed` is the table's (`table_seed`)."""
    a, b, number = initializer.a, initializer.b, np.uint64(seed)
    match initializer.name:
        case InitName.ZEROS:
            return zeros_of(seed)
        case InitName.CONSTANT:
            return First(CONSTANT, number, a)
        case InitName.UNIFORM:
            return First(UNIFORM, number, a, b)
        case InitName.NORMAL:
            return First(NORMAL, number, a, b)
        case InitName.TRUNCATED_NORMAL:
            return _truncated(number, a, b, initializer.c, initializer.d)
        case InitName.XAVIER_UNIFORM:
            bound = a * sqrt(6.0 / (1 + dim))
            return First(UNIFORM, number, -bound, bound)
        case InitName.XAVIER_NORMAL:
            return First(NORMAL, number, 0.0, a * sqrt(2.0 / (1 + dim)))


def zeros_of(seed: int) -> First:
    """Zeros."""
    return First(ZEROS, np.uint64(seed))


def _truncated(seed: np.uint64, mean: float, std: float, low: float, high: float) -> First:
    """The inverse of the distribution between its values at `low` and `high`.

    Mirrored where more of it lies above the mean, since probabilities near 0 are exact and those near 1 are not.
    """
    from_low, from_high = (low - mean) / std, (high - mean) / std
    if from_low + from_high > 0:
        from_low, from_high, std = -from_high, -from_low, -std
    start = probability_below(from_low)
    return First(NORMAL, seed, mean, std, start, probability_below(from_high) - start, low, high)


def table_seed(seed: int, table: str) -> int:
    """What the rows of one table have in common: an unsigned 64-bit hash of the job's seed and the table's name."""
    return int.from_bytes(blake2b(f"{seed}:{table}".encode(), digest_size=8).digest(), "little")


@inline
def log_of(x: float) -> float:
    """The natural logarithm of a number in (2**-60, 1], to about 1e-15.

    A power of two brings it to [sqrt(1/2), sqrt(2)), where log m = 2 atanh((m - 1) / (m + 1)) is a short series.
    """
    bits = np.float64(x).view(np.int64)
    halvings = 1023 - (bits >> 52)
    m = np.int64((bits & _FRACTION) | _ONE).view(np.float64)
    if m >= _SQRT_TWO:
        m *= 0.5
        halvings -= 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = 1.0 / 21.0
    for k in range(9, -1, -1):
        series = series * z + 1.0 / (2.0 * k + 1.0)
    return 2.0 * s * series - halvings * _LN2


@inline
def middle_quantile(q: float) -> float:
    """The x below which a standard normal variable falls with probability `q + 1/2`, where |q| <= MIDDLE.

    *Source*: P. J. Acklam 2003, relative error below 1.2e-9, a fiftieth of what float32 tells apart.
    """
    r = q * q
    above = (((((-3.969683028665376e01 * r + 2.209460984245205e02) * r - 2.759285104469687e02) * r
        + 1.383577518672690e02) * r - 3.066479806614716e01) * r + 2.506628277459239e00)  # fmt: skip
    below = (((((-5.447609879822406e01 * r + 1.615858368580409e02) * r - 1.556989798598866e02) * r
        + 6.680131188771972e01) * r - 1.328068155288572e01) * r + 1.0)  # fmt: skip
    return q * above / below


@inline
def tail_quantile(p: float) -> float:
    """The x below which a standard normal variable falls with probability `p`, where p < 1/2 - MIDDLE; same source."""
    r = np.sqrt(-2.0 * log_of(p))
    above = (((((-7.784894002430293e-03 * r - 3.223964580411365e-01) * r - 2.400758277161838e00) * r
        - 2.549732539343734e00) * r + 4.374664141464968e00) * r + 2.938163982698783e00)  # fmt: skip
    below = ((((7.784695709041462e-03 * r + 3.224671290700398e-01) * r + 2.445134137142996e00) * r
        + 3.754408661907416e00) * r + 1.0)  # fmt: skip
    quantile: float = above / below
    return quantile


@inline
def fraction(stream: np.uint64, column: int) -> float:
    """The number of a column, uniform in (0, 1): an odd multiple of 2**-53."""
    bits = mix(stream + np.uint64(column + 1) * GOLDEN) >> _DROP_TO_52
    return (np.float64(np.int64(bits)) + 0.5) * _ULP


@inline
def fill_uniform(row: Floats, stream: np.uint64, low: float, high: float) -> None:
    """Write numbers uniform in [low, high) or, where these are the same, that number."""
    start, end = np.float32(low), np.float32(high)
    for c in range(row.size):
        value = np.float32(low + (high - low) * fraction(stream, c))
        # rounding to float32 may reach the excluded end
        row[c] = start if value >= end else value


@inline
def between(x: float, first: First) -> np.float32:
    """Round to float32 and no further than the ends."""
    value, low, high = np.float32(x), np.float32(first.low), np.float32(first.high)
    # not min and max: those are no plain comparisons in numba and keep a loop from being vectorized
    if value < low:
        return low
    if value > high:
        return high
    return value


def scratch_for(dim: int) -> Scratch:
    """Scratch for rows of this length, to be used again and again."""
    return Scratch(np.empty(dim), np.empty(_PENDING + dim, np.int64), np.empty(_PENDING + dim))


@inline
def fill_normal(
    target: Floats, start: int, dim: int, stream: np.uint64, first: First, scratch: Scratch, pending: int
) -> int:
    """Write the middle of the distribution in a loop without branches; where it is a tail, note that for later."""
    row, drawn = target[start : start + dim], scratch.drawn
    for c in range(dim):
        drawn[c] = (first.start + first.width * fraction(stream, c)) - 0.5
    for c in range(dim):
        row[c] = between(first.a + first.b * middle_quantile(drawn[c]), first)
    for c in range(dim):
        scratch.places[pending] = start + c
        scratch.tails[pending] = drawn[c]
        pending += int(abs(drawn[c]) > MIDDLE)
    return pending


@kernel(void, writes(f32), FIRST, SCRATCH, i64)
def write_tails(target: Floats, first: First, scratch: Scratch, pending: int) -> None:
    """Write the numbers that were noted, many at once."""
    tails = scratch.tails[:pending]
    for n in range(pending):
        q = tails[n]
        tail = tail_quantile(0.5 - abs(q))
        tails[n] = first.a + (first.b * tail if q < 0.0 else -(first.b * tail))
    for n in range(pending):
        target[scratch.places[n]] = between(tails[n], first)


@inline
def fill_row(target: Floats, start: int, dim: int, key: np.int64, first: First, scratch: Scratch, pending: int) -> int:
    """Write the first value of a key's row; its random numbers are those of splitmix64 seeded by table and key.

    Args:
        target: the row is `target[start : start + dim]`.
        start: see there.
        dim: see there.
        key: the row's.
        first: the table's initializer.
        scratch: of `scratch_for(dim)`.
        pending: how many numbers of earlier rows are noted in it; 0 at first.

    Returns:
        How many are noted now: after the last row they are written with `write_tails`.
    """
    stream = mix(mix(np.uint64(key) ^ first.seed) + first.seed)
    if first.kind == NORMAL:
        pending = fill_normal(target, start, dim, stream, first, scratch, pending)
        if pending >= _PENDING:
            write_tails(target, first, scratch, pending)
            return 0
    elif first.kind == UNIFORM:
        fill_uniform(target[start : start + dim], stream, first.a, first.b)
    else:
        target[start : start + dim] = np.float32(first.a)
    return pending


@kernel(void, reads(i64), i64, FIRST, SCRATCH, writes(f32))
def _initial(keys: Keys, dim: int, first: First, scratch: Scratch, out: Floats) -> None:
    pending = 0
    for i in range(keys.size):
        pending = fill_row(out, i * dim, dim, keys[i], first, scratch, pending)
    write_tails(out, first, scratch, pending)


def first_rows(keys: Keys, dim: int, first: First, scratch: Scratch) -> Floats:
    """The first values of the rows of `keys`, shape (n, dim); `scratch` is of `scratch_for(dim)`."""
    rows = np.empty((keys.size, dim), np.float32)
    _initial(keys, dim, first, scratch, rows.reshape(-1))
    return rows


def initial_rows(keys: Keys, dim: int, initializer: Initializer, seed: int) -> Floats:
    """The first values of the rows of `keys`, shape (n, dim); `seed` is the table's (`table_seed`)."""
    return first_rows(keys, dim, first_values(initializer, dim, seed), scratch_for(dim))


@kernel(f64, f64)
def probability_below(x: float) -> float:
    """The probability that a standard normal variable falls below `x`, by bisection of the quantile used here.

    So the ends of a truncated distribution are where its quantile puts them, with no other function involved.
    """
    low, high = 2.0**-53, 0.5
    for _ in range(110):
        p = 0.5 * (low + high)
        value = tail_quantile(p) if p < 0.5 - MIDDLE else middle_quantile(p - 0.5)
        if value < -abs(x):
            low = p
        else:
            high = p
    return 1.0 - high if x > 0.0 else high
