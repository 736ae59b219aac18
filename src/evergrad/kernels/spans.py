"""Formulas of the update rules that rows of a table and dense parameters have in common, sixteen numbers at once.

Each operation is rounded where torch's CPU kernels round it, products and sums that torch fuses included (`fused`).
"""

from typing import Any

import numpy as np

from evergrad.kernels.jit import inline
from evergrad.kernels.lanes import Lanes, fused, magnitude, power, root, where

Number = float | np.float32


@inline
def decayed(grad: Any, decay: Number, weight: Any) -> Any:
    """The gradient with weight decay; without any the gradient itself, whatever the weight is. Numbers or lanes."""
    return fused(decay, weight, grad) if decay != 0.0 else grad


@inline
def descended(value: Lanes, grad: Lanes, lr: Number, decay: Number) -> Lanes:
    """SGD without momentum: the next value."""
    return fused(-lr, decayed(grad, decay, value), value)


@inline
def descended_with_momentum(
    value: Lanes, buffer: Lanes, grad: Lanes, lr: Number, decay: Number, momentum: Number, share: Number, nesterov: bool
) -> tuple[Lanes, Lanes]:
    """SGD with momentum: the next value and buffer; `share` is 1 - dampening, at first 1."""
    g = decayed(grad, decay, value)
    b = fused(share, g, momentum * buffer)
    return fused(-lr, fused(momentum, b, g) if nesterov else b, value), b


@inline
def _n_to_the_p(n: Lanes, p: float) -> Lanes:
    return root(n) if p == 0.5 else power(n, p)


@inline
def ftrl(
    weight: Lanes, z: Lanes, n: Lanes, grad: Lanes,
    rate: Number, beta: Number, l1: Number, l2: Number, initial: Number, p: float,
) -> tuple[Lanes, Lanes, Lanes]:  # fmt: skip
    """FTRL-Proximal: the next weight, z and n.

    Args:
        weight: the weight now.
        z: its z; not looked at where there was no update yet.
        n: its sum of squares; negative where there was no update yet: z is then found from the weight.
        grad: the gradient.
        rate: 1 / lr.
        beta: of the rule.
        l1: of the rule.
        l2: of the rule.
        initial: n before the first update.
        p: minus the learning rate's power; anything but 1/2 is not the same bits on all machines.
    """
    is_first = n < 0.0
    before = where(is_first, initial, n)
    after = before + grad * grad
    before_p, after_p = _n_to_the_p(before, p), _n_to_the_p(after, p)
    towards = where(weight > 0.0, l1, where(weight < 0.0, -l1, 0.0))
    begun = -(weight * ((beta + before_p) * rate + l2)) - towards
    following = where(is_first, begun, z) + (grad - (after_p - before_p) * rate * weight)
    excess = magnitude(following) - l1
    next_size = excess / ((beta + after_p) * rate + l2)
    next_weight = where(excess > 0.0, where(following < 0.0, next_size, -next_size), 0.0)
    return next_weight, following, after
