"""First values of rows: a pure function of (seed, table, key, column).

Integer hashing and + - * / sqrt on float64 only, so that every machine computes the same bits.
"""

from hashlib import blake2b

import numpy as np

from evergrad.init_rows import Initializer, InitName
from evergrad.kernels.arrays import Floats, Keys
from evergrad.kernels.hashing import mix
from evergrad.kernels.jit import f32, f64, i64, inline, making_kernel, reads, u64, writes

ZEROS, CONSTANT, UNIFORM, NORMAL = range(4)
_KINDS = {
    InitName.ZEROS: ZEROS,
    InitName.CONSTANT: CONSTANT,
    InitName.UNIFORM: UNIFORM,
    InitName.NORMAL: NORMAL,
}
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DROP_TO_52 = np.uint64(12)
_ULP = 2.0**-52
_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
MIDDLE = 0.5 - 0.02425


def kind_of(initializer: Initializer) -> int:
    """The number by which kernels know an initializer."""
    return _KINDS[initializer.name]


def table_seed(seed: int, table: str) -> int:
    """What the rows of one table have in common: an unsigned 64-bit hash of the job's seed and the table's name."""
    return int.from_bytes(blake2b(f"{seed}:{table}".encode(), digest_size=8).digest(), "little")


@inline
def log_of(x: float) -> float:
    """The natural logarithm of a number in (2**-60, 1], to about 1e-15.

    Halving brings it to [sqrt(1/2), sqrt(2)), where log m = 2 atanh((m - 1) / (m + 1)) is a short series.
    """
    halvings = 0
    while x < _SQRT_HALF:
        x *= 2.0
        halvings += 1
    s = (x - 1.0) / (x + 1.0)
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
def fill_normal(row: Floats, stream: np.uint64, mean: float, std: float) -> None:
    """Write normal numbers: the middle of the distribution in a loop without branches, then the rare tails."""
    for c in range(row.size):
        row[c] = np.float32(mean + std * middle_quantile(fraction(stream, c) - 0.5))
    for c in range(row.size):
        q = fraction(stream, c) - 0.5
        if q < -MIDDLE:
            row[c] = np.float32(mean + std * tail_quantile(q + 0.5))
        elif q > MIDDLE:
            row[c] = np.float32(mean - std * tail_quantile(0.5 - q))


@inline
def fill_row(row: Floats, key: np.int64, kind: int, a: float, b: float, seed: np.uint64) -> None:
    """Write the first value of a key's row; its random numbers are those of splitmix64 seeded by table and key."""
    stream = mix(mix(np.uint64(key) ^ seed) + seed)
    if kind == UNIFORM:
        fill_uniform(row, stream, a, b)
    elif kind == NORMAL:
        fill_normal(row, stream, a, b)
    else:
        row[:] = np.float32(a) if kind == CONSTANT else np.float32(0.0)


@making_kernel(writes(f32, 2), reads(i64), i64, i64, f64, f64, u64)
def _initial(keys: Keys, dim: int, kind: int, a: float, b: float, seed: np.uint64) -> Floats:
    rows = np.empty((keys.size, dim), np.float32)
    for i in range(keys.size):
        fill_row(rows[i], keys[i], kind, a, b, seed)
    return rows


def initial_rows(keys: Keys, dim: int, initializer: Initializer, seed: int) -> Floats:
    """The first values of the rows of `keys`, shape (n, dim); `seed` is the table's (`table_seed`)."""
    return _initial(keys, dim, kind_of(initializer), initializer.a, initializer.b, np.uint64(seed))
