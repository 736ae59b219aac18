"""Row initializers: what a row of a table is before its first update.

A row's first value is a pure function of (job seed, table, key, column), computed by the kernels in
`kernels/initial.py`, so neither the order in which keys are met nor the number of pservers matters.
"""

from enum import StrEnum
from math import isfinite

import msgspec

from evergrad.errors import ConfigError

FARTHEST = 7.0
"""Standard deviations from the mean beyond which a truncated normal may not begin."""


class InitName(StrEnum):
    """The initializers there are kernels for."""

    ZEROS = "zeros"
    CONSTANT = "constant"
    UNIFORM = "uniform"
    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    XAVIER_UNIFORM = "xavier_uniform"
    XAVIER_NORMAL = "xavier_normal"


class Initializer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An initializer and its numbers: (value), (low, high), (mean, std), (mean, std, low, high) or (gain)."""

    name: InitName
    a: float
    b: float
    c: float = 0.0
    d: float = 0.0


def zeros() -> Initializer:
    """Every row starts as zeros."""
    return Initializer(InitName.ZEROS, 0.0, 0.0)


def constant(value: float) -> Initializer:
    """Every element starts as `value`."""
    return Initializer(InitName.CONSTANT, _finite("constant", value), 0.0)


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """Elements uniform in [low, high)."""
    if _finite("uniform", high) < _finite("uniform", low):
        raise ConfigError(f"init_rows.uniform: high={high} is below low={low}; swap them")
    return Initializer(InitName.UNIFORM, float(low), float(high))


def normal(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Elements normal with this mean and standard deviation; the default of `torch.nn.Embedding` is (0, 1)."""
    if _finite("normal", std) < 0:
        raise ConfigError(f"init_rows.normal: std={std} is negative; give zero or more")
    return Initializer(InitName.NORMAL, _finite("normal", mean), float(std))


def truncated_normal(mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Initializer:
    """Elements normal with this mean and standard deviation, but only between `a` and `b`.

    The arguments are those of `torch.nn.init.trunc_normal_`: `a` and `b` are values, not numbers of deviations.
    """
    name = "truncated_normal"
    mean, std, a, b = (_finite(name, x) for x in (mean, std, a, b))
    if std <= 0:
        raise ConfigError(f"init_rows.{name}: std={std}; give a number above zero")
    if not a < b:
        raise ConfigError(f"init_rows.{name}: a={a} is not below b={b}")
    nearest = min(max(mean, a), b)
    if abs(nearest - mean) > FARTHEST * std:
        raise ConfigError(
            f"init_rows.{name}: [{a}, {b}] begins {abs(nearest - mean) / std:.1f} standard deviations from the mean;"
            f" {FARTHEST:g} are the most"
        )
    return Initializer(InitName.TRUNCATED_NORMAL, mean, std, a, b)


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Elements uniform in [-a, a) with a = gain * sqrt(6 / (1 + dim)).

    *Source*: Glorot and Bengio 2010, equation 16, for the row as a matrix of its own: fan-in dim and fan-out 1. Torch's
    `xavier_uniform_` takes the number of rows for the other fan, and a table has none.
    """
    return Initializer(InitName.XAVIER_UNIFORM, _gain("xavier_uniform", gain), 0.0)


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Elements normal with mean 0 and standard deviation gain * sqrt(2 / (1 + dim)); fans as in `xavier_uniform`."""
    return Initializer(InitName.XAVIER_NORMAL, _gain("xavier_normal", gain), 0.0)


def _gain(name: str, value: float) -> float:
    if _finite(name, value) < 0:
        raise ConfigError(f"init_rows.{name}: gain={value} is negative; give zero or more")
    return float(value)


def _finite(name: str, value: float) -> float:
    if not isfinite(value):
        raise ConfigError(f"init_rows.{name}: {value} is not a finite number")
    return float(value)
