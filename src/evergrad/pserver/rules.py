"""From a rule and its hyperparameters to the kernel that applies it, with the factors that need powers."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from evergrad.errors import InvariantError
from evergrad.kernels import dense, rules
from evergrad.kernels.lanes import Wired
from evergrad.messages import Floats, Keys
from evergrad.optim import RuleName, RuleSpec


class AdamFactors(NamedTuple):
    """What one update of Adam and AdamW multiplies by; see the kernels."""

    decay: float
    keep: float
    rest1: float
    rest2: float


def apply_rows(rule: RuleSpec, arena: Floats, rows: Keys, grads: Wired, lr: float, updates: int) -> None:
    """Apply a rule once to each of these rows of an arena.

    Args:
        rule: the table's.
        arena: rows of `rule.row_width(dim)` floats, one after the other.
        rows: different numbers of rows.
        grads: shape (n, dim), as kernels see the job's wire.
        lr: the learning rate.
        updates: updates of the table, with this one.
    """
    hyper = rule.hyper
    decay = hyper.get("weight_decay", 0.0)
    match rule.name:
        case RuleName.SGD if rule.state_width == 0:
            rules.sgd_rows(arena, rows, grads, lr, decay)
        case RuleName.SGD:
            rules.momentum_rows(
                arena, rule.row_width(grads.shape[1]), rows, grads,
                lr, decay, hyper["momentum"], 1 - hyper["dampening"], bool(hyper["nesterov"]),
            )  # fmt: skip
        case RuleName.ADAGRAD:
            rules.adagrad_rows(arena, rows, grads, _decayed_rate(rule, lr, updates), decay, hyper["eps"])
        case RuleName.ROWWISE_ADAGRAD:
            rate = _decayed_rate(rule, lr, updates)
            rules.rowwise_adagrad_rows(arena, rows, grads, rate, decay, hyper["eps"])
        case RuleName.ADAM | RuleName.ADAMW:
            beta1, beta2 = hyper["beta1"], hyper["beta2"]
            step_size = lr * sqrt(1 - beta2**updates) / (1 - beta1**updates)
            f = _adam_factors(rule, lr)
            rules.adam_rows(arena, rows, grads, step_size, f.decay, f.keep, f.rest1, f.rest2, hyper["eps"])
        case RuleName.FTRL:
            if lr == 0.0:
                return
            rules.ftrl_rows(arena, rows, grads, 1 / lr, *_ftrl_hyper(rule))


def apply_dense(
    rule: RuleSpec, values: Floats, state: Sequence[Floats], grads: Floats, lr: float, updates: int
) -> None:
    """Apply a rule to flat values.

    Args:
        rule: the group's.
        values: changed in place.
        state: `rule.state_width` arrays of the shape of `values`, changed in place.
        grads: of the shape of `values`.
        lr: the learning rate.
        updates: updates of the parameter, with this one.
    """
    hyper = rule.hyper
    decay = hyper.get("weight_decay", 0.0)
    match rule.name:
        case RuleName.SGD if rule.state_width == 0:
            dense.sgd_dense(values, grads, lr, decay)
        case RuleName.SGD:
            share = 1 - hyper["dampening"] if updates > 1 else 1.0
            dense.momentum_dense(values, state[0], grads, lr, decay, hyper["momentum"], share, bool(hyper["nesterov"]))
        case RuleName.ADAGRAD:
            dense.adagrad_dense(values, state[0], grads, _decayed_rate(rule, lr, updates), decay, hyper["eps"])
        case RuleName.ROWWISE_ADAGRAD:
            raise InvariantError("RowWiseAdagrad is for tables and was sent for a dense group")
        case RuleName.ADAM | RuleName.ADAMW:
            beta1, beta2 = hyper["beta1"], hyper["beta2"]
            f = _adam_factors(rule, lr)
            dense.adam_dense(
                values, state[0], state[1], grads, lr / (1 - beta1**updates), f.decay, f.keep,
                f.rest1, beta2, f.rest2, sqrt(1 - beta2**updates), hyper["eps"],
            )  # fmt: skip
        case RuleName.FTRL:
            if lr == 0.0:
                return
            dense.ftrl_dense(values, state[0], state[1], grads, 1 / lr, *_ftrl_hyper(rule))


def _decayed_rate(rule: RuleSpec, lr: float, updates: int) -> float:
    return lr / (1 + (updates - 1) * rule.hyper["lr_decay"])


def _ftrl_hyper(rule: RuleSpec) -> tuple[float, float, float, float, float]:
    hyper = rule.hyper
    return hyper["beta"], hyper["l1"], hyper["l2"], hyper["initial"], -hyper["power"]


def _adam_factors(rule: RuleSpec, lr: float) -> AdamFactors:
    hyper = rule.hyper
    decay = hyper["weight_decay"]
    is_decoupled = rule.name is RuleName.ADAMW
    return AdamFactors(
        0.0 if is_decoupled else decay, 1 - lr * decay if is_decoupled else 1.0, 1 - hyper["beta1"], 1 - hyper["beta2"]
    )
