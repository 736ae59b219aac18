"""Update rules as a user names them, and as they cross the wire.

The names of hyperparameters are torch's. A learning rate is a number or a function of the step; the trainer evaluates
it for its step and sends the number with the push, so a rule on the wire has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

import msgspec

from evergrad.errors import ConfigError

LearningRate = float | Callable[[int], float]


class RuleName(StrEnum):
    """The rules a pserver has kernels for."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAM = "adam"


class RuleSpec(msgspec.Struct, frozen=True):
    """A rule without its learning rate: what a pserver is told and what two trainers must agree on."""

    name: RuleName
    hyper: dict[str, float]

    @property
    def state_width(self) -> int:
        """Floats of optimizer state kept beside each float of a parameter or row."""
        match self.name:
            case RuleName.SGD:
                return 0
            case RuleName.ADAGRAD:
                return 1
            case RuleName.ADAM:
                return 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent: `w -= lr * g`. *Source*: `torch.optim.SGD` without momentum."""

    lr: LearningRate = 1e-3

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        return RuleSpec(RuleName.SGD, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """Adagrad: `s += g*g; w -= lr * g / (sqrt(s) + eps)`.

    *Source*: Duchi et al. 2011, as `torch.optim.Adagrad` computes it (one `s` per element, no `lr_decay`).
    """

    lr: LearningRate = 1e-2
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        _positive("Adagrad", "eps", self.eps, zero=True)
        _positive("Adagrad", "initial_accumulator_value", self.initial_accumulator_value, zero=True)
        return RuleSpec(RuleName.ADAGRAD, {"initial": float(self.initial_accumulator_value), "eps": float(self.eps)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam. For dense parameters `torch.optim.Adam`, for tables `torch.optim.SparseAdam` (only rows met are touched).

    The two differ in torch in where `eps` stands: dense divides by `sqrt(v) / sqrt(1 - beta2**t) + eps`, sparse by
    `sqrt(v) + eps` with the correction in the step size. `t` counts the updates of the parameter or of the table.

    *Source*: Kingma and Ba 2015, algorithm 1.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        _positive("Adam", "eps", self.eps, zero=True)
        for name, beta in zip(("betas[0]", "betas[1]"), self.betas, strict=True):
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"Adam: {name} is {beta}; give a number from 0 up to, but not, 1")
        beta1, beta2 = self.betas
        return RuleSpec(RuleName.ADAM, {"beta1": float(beta1), "beta2": float(beta2), "eps": float(self.eps)})


Rule = SGD | Adagrad | Adam


def learning_rate(lr: LearningRate, step: int) -> float:
    """The learning rate of one step.

    Raises:
        ConfigError: it is not a finite number of zero or more.
    """
    value = lr(step) if callable(lr) else lr
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"the learning rate for step {step} is {value!r}; it must be a number") from None
    if not isfinite(number) or number < 0:
        raise ConfigError(f"the learning rate for step {step} is {number}; it must be finite and not negative")
    return number


def _positive(rule: str, name: str, value: float, *, zero: bool) -> None:
    if not isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(
            f"{rule}: {name} is {value}; give a finite number {'of zero or more' if zero else 'above zero'}"
        )
