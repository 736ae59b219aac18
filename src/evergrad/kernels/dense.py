"""Update rules for flat dense values.

Every rule is elementwise: an element's result depends on nothing but that element's numbers. Formulas and their sources
are in `optim.py`. As for rows (`rules.py`) the bits are torch's but for its square root.
"""

from evergrad.kernels.arrays import Floats
from evergrad.kernels.jit import f32, f64, flag, inline, kernel, reads, void, writes
from evergrad.kernels.lanes import Count, fused, load, over, root, store
from evergrad.kernels.spans import decayed, descended, descended_with_momentum, ftrl


@inline
def _sgd(at: int, count: Count, values: Floats, grads: Floats, lr: float, decay: float) -> None:
    store(values, at, count, descended(load(values, at, count), load(grads, at, count), lr, decay))


@kernel(void, writes(f32), reads(f32), f32, f32)
def sgd_dense(values: Floats, grads: Floats, lr: float, decay: float) -> None:
    """SGD without momentum."""
    over(_sgd, values.size, (values, grads, lr, decay))


@inline
def _momentum(
    at: int, count: Count, values: Floats, buffers: Floats, grads: Floats,
    lr: float, decay: float, momentum: float, share: float, nesterov: bool,
) -> None:  # fmt: skip
    value, buffer, grad = load(values, at, count), load(buffers, at, count), load(grads, at, count)
    value, buffer = descended_with_momentum(value, buffer, grad, lr, decay, momentum, share, nesterov)
    store(values, at, count, value)
    store(buffers, at, count, buffer)


@kernel(void, writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, flag)
def momentum_dense(
    values: Floats, buffers: Floats, grads: Floats,
    lr: float, decay: float, momentum: float, share: float, nesterov: bool,
) -> None:  # fmt: skip
    """SGD with momentum; `share` is 1 - dampening, at the first update 1."""
    over(_momentum, values.size, (values, buffers, grads, lr, decay, momentum, share, nesterov))


@inline
def _adagrad(
    at: int, count: Count, values: Floats, sums: Floats, grads: Floats, lr: float, decay: float, eps: float
) -> None:
    value = load(values, at, count)
    g = decayed(load(grads, at, count), decay, value)
    s = fused(g, g, load(sums, at, count))
    store(sums, at, count, s)
    store(values, at, count, value - lr * g / (root(s) + eps))


@kernel(void, writes(f32), writes(f32), reads(f32), f32, f32, f32)
def adagrad_dense(values: Floats, sums: Floats, grads: Floats, lr: float, decay: float, eps: float) -> None:
    """Adagrad."""
    over(_adagrad, values.size, (values, sums, grads, lr, decay, eps))


@inline
def _adam(
    at: int, count: Count, values: Floats, firsts: Floats, seconds: Floats, grads: Floats, step_size: float,
    decay: float, keep: float, rest1: float, beta2: float, rest2: float, root2: float, eps: float,
) -> None:  # fmt: skip
    value, first, second = load(values, at, count), load(firsts, at, count), load(seconds, at, count)
    g = decayed(load(grads, at, count), decay, value)
    # as torch.lerp does it: from the nearer end
    m = fused(rest1, g - first, first) if rest1 < 0.5 else fused(rest1 - 1.0, g - first, g)
    v = fused(rest2 * g, g, second * beta2)
    store(firsts, at, count, m)
    store(seconds, at, count, v)
    store(values, at, count, keep * value - step_size * m / (root(v) / root2 + eps))


@kernel(void, writes(f32), writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, f32, f32, f32, f32)
def adam_dense(
    values: Floats, firsts: Floats, seconds: Floats, grads: Floats, step_size: float, decay: float, keep: float,
    rest1: float, beta2: float, rest2: float, root2: float, eps: float,
) -> None:  # fmt: skip
    """Adam as `torch.optim.Adam`.

    `keep` is what a value is multiplied by first, `rest` is 1 - beta, `root2` is sqrt(1 - beta2**t).
    """
    over(
        _adam, values.size, (values, firsts, seconds, grads, step_size, decay, keep, rest1, beta2, rest2, root2, eps)
    )  # fmt: skip


@inline
def _ftrl(
    at: int, count: Count, values: Floats, linear: Floats, sums: Floats, grads: Floats,
    rate: float, beta: float, l1: float, l2: float, initial: float, p: float,
) -> None:  # fmt: skip
    value, z, n = load(values, at, count), load(linear, at, count), load(sums, at, count)
    value, z, n = ftrl(value, z, n, load(grads, at, count), rate, beta, l1, l2, initial, p)
    store(values, at, count, value)
    store(linear, at, count, z)
    store(sums, at, count, n)


@kernel(void, writes(f32), writes(f32), writes(f32), reads(f32), f32, f32, f32, f32, f32, f64)
def ftrl_dense(
    values: Floats, linear: Floats, sums: Floats, grads: Floats,
    rate: float, beta: float, l1: float, l2: float, initial: float, p: float,
) -> None:  # fmt: skip
    """FTRL-Proximal; `rate` is 1 / lr, `p` minus the learning rate's power."""
    over(_ftrl, values.size, (values, linear, sums, grads, rate, beta, l1, l2, initial, p))
