"""Update rules for flat dense values.

Every rule is elementwise: an element's result depends on nothing but that element's numbers. Formulas and their sources
are in `optim.py`. As for rows (`rules.py`) the bits are torch's but for its square root.
"""

import numpy as np

from evergrad.kernels.arrays import Floats
from evergrad.kernels.jit import f32, f64, flag, fused, kernel, reads, void, writes
from evergrad.kernels.spans import decayed, descend, descend_with_momentum, ftrl, ftrl_of_power


@kernel(void, writes(f32), reads(f32), f32, f32)
def sgd_dense(values: Floats, grads: Floats, lr: float, decay: float) -> None:
    """SGD without momentum."""
    descend(values, grads, lr, decay)


@kernel(void, writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, flag)
def momentum_dense(
    values: Floats, buffers: Floats, grads: Floats,
    lr: float, decay: float, momentum: float, share: float, nesterov: bool,
) -> None:  # fmt: skip
    """SGD with momentum; `share` is 1 - dampening, at the first update 1."""
    descend_with_momentum(values, buffers, grads, lr, decay, momentum, share, nesterov)


@kernel(void, writes(f32), writes(f32), reads(f32), f32, f32, f32)
def adagrad_dense(values: Floats, sums: Floats, grads: Floats, lr: float, decay: float, eps: float) -> None:
    """Adagrad."""
    for i in range(values.size):
        g = decayed(grads[i], decay, values[i])
        sums[i] = fused(g, g, sums[i])
        values[i] -= lr * g / (np.sqrt(sums[i]) + eps)


@kernel(void, writes(f32), writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, f32, f32, f32, f32)
def adam_dense(
    values: Floats, firsts: Floats, seconds: Floats, grads: Floats, step_size: float, decay: float, keep: float,
    rest1: float, beta2: float, rest2: float, root2: float, eps: float,
) -> None:  # fmt: skip
    """Adam as `torch.optim.Adam`.

    `keep` is what a value is multiplied by first, `rest` is 1 - beta, `root2` is sqrt(1 - beta2**t).
    """
    # as torch.lerp does it: from the nearer end
    forward = rest1 < 0.5
    factor = rest1 if forward else rest1 - np.float32(1.0)
    for i in range(values.size):
        g = decayed(grads[i], decay, values[i])
        m = fused(factor, g - firsts[i], firsts[i] if forward else g)
        v = fused(rest2 * g, g, seconds[i] * beta2)
        firsts[i] = m
        seconds[i] = v
        values[i] = keep * values[i] - step_size * m / (np.sqrt(v) / root2 + eps)


@kernel(void, writes(f32), writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, f32)
def ftrl_dense(
    values: Floats, linear: Floats, sums: Floats, grads: Floats,
    rate: float, beta: float, l1: float, l2: float, initial: float,
) -> None:  # fmt: skip
    """FTRL-Proximal; `rate` is 1 / lr."""
    ftrl(values, linear, sums, grads, rate, beta, l1, l2, initial)


@kernel(void, writes(f32), writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, f32, f64)
def ftrl_power_dense(
    values: Floats, linear: Floats, sums: Floats, grads: Floats,
    rate: float, beta: float, l1: float, l2: float, initial: float, power: float,
) -> None:  # fmt: skip
    """FTRL-Proximal with another power than 1/2."""
    ftrl_of_power(values, linear, sums, grads, rate, beta, l1, l2, initial, power)
