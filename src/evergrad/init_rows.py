"""Row initializers: what a row of a table is before its first update.

A row's first value is a pure function of (job seed, table, key, column), computed by the kernels in
`kernels/initial.py`, so neither the order in which keys are met nor the number of pservers matters.
"""

from enum import StrEnum
from math import isfinite

import msgspec

from evergrad.errors import ConfigError


class InitName(StrEnum):
    """The initializers there are kernels for."""

    ZEROS = "zeros"
    CONSTANT = "constant"
    UNIFORM = "uniform"
    NORMAL = "normal"


class Initializer(msgspec.Struct, frozen=True):
    """An initializer and its two numbers: (value, -), (low, high) or (mean, std)."""

    name: InitName
    a: float = 0.0
    b: float = 0.0


def zeros() -> Initializer:
    """Every row starts as zeros."""
    return Initializer(InitName.ZEROS)


def constant(value: float) -> Initializer:
    """Every element starts as `value`."""
    return Initializer(InitName.CONSTANT, _finite("constant", value))


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


def _finite(name: str, value: float) -> float:
    if not isfinite(value):
        raise ConfigError(f"init_rows.{name}: {value} is not a finite number")
    return float(value)
