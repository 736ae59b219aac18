"""Pieces of the update rules that rows of a table and dense parameters have in common, over a span of elements.

Each operation is rounded where torch's CPU kernels round it, products and sums that torch fuses included (`fused`).
"""

import numpy as np

from evergrad.kernels.arrays import Floats
from evergrad.kernels.jit import fused, inline

Number = float | np.float32


@inline
def decayed(grad: Number, decay: Number, weight: Number) -> np.float32:
    """The gradient with weight decay; without any the gradient itself, whatever the weight is."""
    return fused(decay, weight, grad) if decay != 0.0 else np.float32(grad)


@inline
def descend(values: Floats, grads: Floats, lr: Number, decay: Number) -> None:
    """SGD without momentum."""
    for c in range(values.size):
        values[c] = fused(-lr, decayed(grads[c], decay, values[c]), values[c])


@inline
def descend_with_momentum(
    values: Floats, buffers: Floats, grads: Floats, lr: Number, decay: Number, momentum: Number, share: Number,
    nesterov: bool,
) -> None:  # fmt: skip
    """SGD with momentum; `share` is 1 - dampening, at first 1."""
    for c in range(values.size):
        g = decayed(grads[c], decay, values[c])
        b = fused(share, g, momentum * buffers[c])
        buffers[c] = b
        values[c] = fused(-lr, fused(momentum, b, g) if nesterov else b, values[c])


@inline
def ftrl_element(
    weight: Number, z: Number, grad: Number, is_first: bool, root: Number, root_after: Number,
    rate: Number, beta: Number, l1: Number, l2: Number,
) -> tuple[Number, Number]:  # fmt: skip
    """The next weight and z of one element.

    Args:
        weight: the weight now.
        z: its z; not looked at if `is_first`.
        grad: the gradient.
        is_first: z is to be found from the weight.
        root: n**p before this gradient.
        root_after: n**p with it.
        rate: 1 / lr.
        beta: of the rule.
        l1: of the rule.
        l2: of the rule.
    """
    towards: Number = np.float32(0.0)
    if weight != 0.0:
        towards = l1 if weight > 0.0 else -l1
    begun = -(weight * ((beta + root) * rate + l2)) - towards
    following = (begun if is_first else z) + (grad - (root_after - root) * rate * weight)
    excess = np.abs(following) - l1
    size = excess / ((beta + root_after) * rate + l2)
    next_weight: Number = np.float32(0.0)
    if excess > 0.0:
        next_weight = size if following < 0.0 else -size
    return next_weight, following


@inline
def ftrl(
    values: Floats, linear: Floats, sums: Floats, grads: Floats,
    rate: Number, beta: Number, l1: Number, l2: Number, initial: Number,
) -> None:  # fmt: skip
    """FTRL-Proximal with the square root as power; a negative sum marks an element without an update."""
    for c in range(values.size):
        g = grads[c]
        is_first = sums[c] < 0.0
        before = initial if is_first else sums[c]
        after = before + g * g
        sums[c] = after
        values[c], linear[c] = ftrl_element(
            values[c], linear[c], g, is_first, np.sqrt(before), np.sqrt(after), rate, beta, l1, l2
        )


@inline
def power_of(x: Number, power: float) -> np.float32:
    """A power by the machine's own function: not the same bits on all machines."""
    return np.float32(np.float64(x) ** power)


@inline
def ftrl_of_power(
    values: Floats, linear: Floats, sums: Floats, grads: Floats,
    rate: Number, beta: Number, l1: Number, l2: Number, initial: Number, power: float,
) -> None:  # fmt: skip
    """FTRL-Proximal with any power."""
    for c in range(values.size):
        g = grads[c]
        is_first = sums[c] < 0.0
        before = initial if is_first else sums[c]
        after = before + g * g
        sums[c] = after
        values[c], linear[c] = ftrl_element(
            values[c], linear[c], g, is_first, power_of(before, power), power_of(after, power), rate, beta, l1, l2
        )
