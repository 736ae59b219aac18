"""Update rules as a user names them, and as they cross the wire.

The names of hyperparameters are torch's. A learning rate is a number or a function of the step; the trainer evaluates
it for its step and sends the number with the push, so a rule on the wire has none.

Rules are lazy for tables: an update touches the rows met in it and no other, where torch's dense rules would decay
momentum, averages and weights of all rows. `weight_decay`, which torch refuses or leaves out for sparse gradients, is
meant the same way: a row decays when it is met. Not offered: torch's `amsgrad`, `maximize`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import get_args

import msgspec

from evergrad.errors import ConfigError

LearningRate = float | Callable[[int], float]
NOT_BEGUN = -1.0
"""Initial state of FTRL: no sum of squares is negative, so this marks an element that had no update yet."""


class RuleName(StrEnum):
    """The rules a pserver has kernels for."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    ADAM = "adam"
    ADAMW = "adamw"
    FTRL = "ftrl"


class RuleSpec(msgspec.Struct, frozen=True):
    """A rule without its learning rate: what a pserver is told and what two trainers must agree on."""

    name: RuleName
    hyper: dict[str, float]

    @property
    def state_width(self) -> int:
        """Floats of optimizer state kept for each float of a parameter or row."""
        match self.name:
            case RuleName.SGD:
                return 1 if self.hyper["momentum"] else 0
            case RuleName.ROWWISE_ADAGRAD:
                return 0
            case RuleName.ADAGRAD:
                return 1
            case RuleName.ADAM | RuleName.ADAMW | RuleName.FTRL:
                return 2

    def row_width(self, dim: int) -> int:
        """Floats a row of a table takes: its value, then the state of its elements, then what it keeps once a row.

        Once a row: the accumulator of RowWiseAdagrad; for SGD whose momentum is dampened whether it began.
        """
        once = self.name is RuleName.ROWWISE_ADAGRAD or (
            self.name is RuleName.SGD and self.state_width == 1 and self.hyper["dampening"] != 0
        )
        return dim * (1 + self.state_width) + once

    @property
    def initial_state(self) -> float:
        """What every float of the state is before the first update."""
        match self.name:
            case RuleName.SGD:
                # momentum * -0.0 + g is g to the bit, for a g of -0.0 too
                return -0.0
            case RuleName.ADAGRAD | RuleName.ROWWISE_ADAGRAD:
                return self.hyper["initial"]
            case RuleName.ADAM | RuleName.ADAMW:
                return 0.0
            case RuleName.FTRL:
                return NOT_BEGUN


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent: `g += weight_decay * w; b = momentum * b + (1 - dampening) * g; w -= lr * b`.

    The first gradient is taken as `b` undampened; without momentum `b` is `g`; with `nesterov` the step is along
    `g + momentum * b`. For tables momentum is lazy: `b` of a row changes when it is met, and its first gradient
    is that of the update that makes it.

    *Source*: `torch.optim.SGD`; Sutskever et al. 2013 for nesterov, in torch's form.
    """

    lr: LearningRate = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        hyper = _numbers(self, momentum=self.momentum, weight_decay=self.weight_decay)
        if not isfinite(self.dampening):
            raise ConfigError(f"SGD: dampening is {self.dampening}; give a finite number")
        if self.nesterov and (not self.momentum or self.dampening):
            raise ConfigError("SGD: nesterov needs a momentum above zero and no dampening, as in torch")
        return RuleSpec(
            RuleName.SGD, {**hyper, "dampening": float(self.dampening), "nesterov": float(bool(self.nesterov))}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """Adagrad: `g += weight_decay * w; s += g*g; w -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)`.

    `t` counts the updates of the parameter or of the table, `s` starts at `initial_accumulator_value`.

    *Source*: Duchi et al. 2011, as `torch.optim.Adagrad` computes it (one `s` per element).
    """

    lr: LearningRate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        return RuleSpec(RuleName.ADAGRAD, _adagrad_numbers(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWiseAdagrad:
    """Adagrad with one accumulator a row: `s += mean(g*g); w -= lr * g / (sqrt(s) + eps)`. For tables only.

    It takes four bytes of state a row. `lr_decay` and `weight_decay` (before the mean) are as in `Adagrad`.

    *Source*: "exact row-wise Adagrad" of FBGEMM and TorchRec; theirs sums the squares in float32, ours in
    float64: a sum for each of sixteen columns side by side, every sixteenth column going to the same; of these the
    last eight are added to the first eight, then four to four, and so on; their mean is added and rounded once.
    """

    lr: LearningRate = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        return RuleSpec(RuleName.ROWWISE_ADAGRAD, _adagrad_numbers(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam. For dense parameters `torch.optim.Adam`, for tables `torch.optim.SparseAdam` (only rows met are touched).

    The two differ in torch in where `eps` stands: dense divides by `sqrt(v) / sqrt(1 - beta2**t) + eps`, sparse by
    `sqrt(v) + eps` with the correction in the step size. `t` counts the updates of the parameter or of the table.
    `weight_decay` times the weight is added to the gradient, for rows too, where torch has none.

    *Source*: Kingma and Ba 2015, algorithm 1.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        return RuleSpec(RuleName.ADAM, _adam_numbers(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay: `w *= 1 - lr * weight_decay` goes before Adam's step.

    For dense parameters `torch.optim.AdamW`. For tables, where torch has none, the step of `torch.optim.SparseAdam`
    after the decay of the rows met.

    *Source*: Loshchilov and Hutter 2019, algorithm 2, with the schedule multiplier in `lr` as in torch.
    """

    lr: LearningRate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        return RuleSpec(RuleName.ADAMW, _adam_numbers(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class FTRL:
    """FTRL-Proximal: weights that are exactly zero until their gradients amount to more than `l1`.

        s = ((n + g*g)**p - n**p) / lr;  z += g - s * w;  n += g*g            p = -lr_power
        w = 0 if |z| <= l1 else -(z - sign(z) * l1) / ((beta + n**p) / lr + l2)

    `lr` is the paper's alpha. `n` starts at `initial_accumulator_value`. A weight that does not start at zero starts as
    if gradients had led there: at its first update `z` is set so that `w(z)` is the initial value. With
    `init_rows.zeros()` this is the algorithm to the letter, and what sparse weights want. A learning rate that changes
    counts in both lines from then on; a step with rate 0 changes nothing. An `lr_power` other than -0.5
    needs the machine's own power function, which withdraws the promise of same bits on unequal machines, and is slower.

    *Source*: McMahan et al. 2013, algorithm 1 (where the power is -0.5). `l2` is not doubled, as it is in TensorFlow's.
    """

    lr: LearningRate = 0.1
    lr_power: float = -0.5
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0

    def spec(self) -> RuleSpec:
        """The rule as the pservers see it."""
        hyper = _numbers(self, beta=self.beta, l1=self.l1, l2=self.l2)
        initial = _numbers(self, initial_accumulator_value=self.initial_accumulator_value)
        if not isfinite(self.lr_power) or self.lr_power > 0:
            raise ConfigError(f"FTRL: lr_power is {self.lr_power}; give a finite number of zero or less")
        if not (self.beta or self.l2 or self.initial_accumulator_value):
            raise ConfigError("FTRL: beta, l2 and initial_accumulator_value are all zero; give one above zero")
        return RuleSpec(
            RuleName.FTRL,
            {**hyper, "initial": initial["initial_accumulator_value"], "power": float(self.lr_power)},
        )


Rule = SGD | Adagrad | RowWiseAdagrad | Adam | AdamW | FTRL


def checked_rule(where: str, rule: object) -> Rule:
    """A rule as a user gave it.

    Raises:
        ConfigError: it is something else; `where` says what asked for it.
    """
    if not isinstance(rule, Rule):
        what = rule.__name__ if isinstance(rule, type) else type(rule).__name__
        *names, last = (f"eg.{kind.__name__}" for kind in get_args(Rule))
        raise ConfigError(f"{where} is no rule but {what}; give {', '.join(names)} or {last}, as eg.Adagrad(lr=0.05)")
    return rule


def fixed_rate(rule: Rule) -> float | None:
    """A rule's learning rate as given; None for a function of the step."""
    return None if callable(rule.lr) else float(rule.lr)


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


def _adagrad_numbers(rule: Adagrad | RowWiseAdagrad) -> dict[str, float]:
    named = _numbers(
        rule, eps=rule.eps, lr_decay=rule.lr_decay, weight_decay=rule.weight_decay,
        initial_accumulator_value=rule.initial_accumulator_value,
    )  # fmt: skip
    return {"initial": named.pop("initial_accumulator_value"), **named}


def _adam_numbers(rule: Adam | AdamW) -> dict[str, float]:
    for name, beta in zip(("betas[0]", "betas[1]"), rule.betas, strict=True):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"{type(rule).__name__}: {name} is {beta}; give a number from 0 up to, but not, 1")
    beta1, beta2 = rule.betas
    return {
        "beta1": float(beta1),
        "beta2": float(beta2),
        **_numbers(rule, eps=rule.eps, weight_decay=rule.weight_decay),
    }


def _numbers(rule: Rule, **named: float) -> dict[str, float]:
    """These hyperparameters of a rule, each a finite number of zero or more."""
    for name, value in named.items():
        if not isfinite(value) or value < 0:
            raise ConfigError(f"{type(rule).__name__}: {name} is {value}; give a finite number of zero or more")
    return {name: float(value) for name, value in named.items()}
