"""The rules against `torch.optim`, for hundreds of steps.

SGD has torch's bits. Torch's float32 square root on CPU is not always the correctly rounded one, ours is; so Adagrad
and the Adams are checked twice: to the bit with a correctly rounded root put into torch, and as torch is
within a bound.

Where torch has no rule for sparse gradients, what "lazy" means is said with torch: a row with momentum is a parameter
of its own, without gradient where it is not met; weight decay is done to the gradients or weights of the rows met.
"""

import numpy as np
import pytest
import torch

from evergrad import init_rows
from evergrad.messages import GroupKind, GroupSpec, ParameterSpec, TableSpec
from evergrad.optim import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from evergrad.placement import SLOTS
from evergrad.pserver.dense import DenseGroup
from evergrad.pserver.table import Table

STEPS = 300
LR = 0.05
ULPS = 64
"""Bound on the drift from torch after STEPS steps: units in the last place of the largest value (about 1e-5 of it)."""

DENSE = [
    (SGD(), lambda p: torch.optim.SGD(p, lr=LR, foreach=False)),
    (SGD(momentum=0.9), lambda p: torch.optim.SGD(p, LR, 0.9, foreach=False)),
    (
        SGD(momentum=0.8, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, LR, 0.8, 0.3, 0.01, foreach=False),
    ),
    (
        SGD(momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, LR, 0.9, 0, 0.01, True, foreach=False),
    ),
    (SGD(weight_decay=0.1), lambda p: torch.optim.SGD(p, LR, weight_decay=0.1, foreach=False)),
    (Adagrad(initial_accumulator_value=0.1), lambda p: torch.optim.Adagrad(p, LR, 0, 0, 0.1, foreach=False)),
    (Adagrad(eps=1e-3), lambda p: torch.optim.Adagrad(p, LR, eps=1e-3, foreach=False)),
    (Adagrad(lr_decay=0.01, weight_decay=0.02), lambda p: torch.optim.Adagrad(p, LR, 0.01, 0.02, foreach=False)),
    (Adam(), lambda p: torch.optim.Adam(p, LR, foreach=False)),
    (Adam(betas=(0.8, 0.9), eps=1e-3), lambda p: torch.optim.Adam(p, LR, (0.8, 0.9), 1e-3, foreach=False)),
    (Adam(betas=(0.5, 0.999), eps=1e-3), lambda p: torch.optim.Adam(p, LR, (0.5, 0.999), 1e-3, foreach=False)),
    (Adam(betas=(0.0, 0.9)), lambda p: torch.optim.Adam(p, LR, (0.0, 0.9), foreach=False)),
    (Adam(weight_decay=0.1), lambda p: torch.optim.Adam(p, LR, weight_decay=0.1, foreach=False)),
    (AdamW(), lambda p: torch.optim.AdamW(p, LR, foreach=False)),
    (AdamW(weight_decay=0.5), lambda p: torch.optim.AdamW(p, LR, weight_decay=0.5, foreach=False)),
]
SPARSE = [
    (SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
    (Adagrad(initial_accumulator_value=0.1), lambda p: torch.optim.Adagrad(p, LR, 0, 0, 0.1)),
    (Adagrad(), lambda p: torch.optim.Adagrad(p, LR)),
    (Adagrad(lr_decay=0.1), lambda p: torch.optim.Adagrad(p, LR, 0.1)),
    (Adam(), lambda p: torch.optim.SparseAdam(p, LR)),
    (Adam(betas=(0.8, 0.9), eps=1e-3), lambda p: torch.optim.SparseAdam(p, LR, (0.8, 0.9), 1e-3)),
    # as torch with the decay done before
    (SGD(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=LR)),
    (Adagrad(weight_decay=0.1), lambda p: torch.optim.Adagrad(p, LR)),
    (Adam(weight_decay=0.1), lambda p: torch.optim.SparseAdam(p, LR)),
    (AdamW(weight_decay=0.5), lambda p: torch.optim.SparseAdam(p, LR)),
]
MOMENTUM = [
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True),
    SGD(momentum=0.8, dampening=0.3),
    SGD(momentum=0.8, dampening=-0.5, weight_decay=0.05),
    SGD(momentum=0.9, nesterov=True, weight_decay=0.05),
]
EVERY_RULE = [
    SGD(),
    SGD(momentum=0.9, dampening=0.5, weight_decay=0.1),
    SGD(momentum=0.9, nesterov=True),
    Adagrad(lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
    Adam(weight_decay=0.1),
    AdamW(),
    FTRL(l1=0.1, l2=0.1),
    FTRL(l1=0.1, lr_power=-0.7),
]


@pytest.fixture(autouse=True)
def _checked_sparse_tensors():
    """Torch warns when nobody has said whether it shall check sparse tensors."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


@pytest.fixture
def exact_root(monkeypatch):
    """Torch with a correctly rounded float32 square root."""
    root = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: root(x.double()).float())
    monkeypatch.setattr(torch.Tensor, "sqrt_", lambda x: x.copy_(root(x.double())))


def after_dense_steps(rule, make):
    sizes = (513, 40)
    rng = np.random.default_rng(3)
    params = [torch.nn.Parameter(torch.from_numpy(rng.standard_normal(n).astype(np.float32))) for n in sizes]
    optimizer = make(params)
    spec = GroupSpec(GroupKind.TRAINED, rule.spec(), tuple(ParameterSpec(str(n), (n,), "float32") for n in sizes))
    group = DenseGroup(spec, range(sum(sizes)))
    group.set(np.concatenate([p.detach().numpy() for p in params]))
    for step in range(STEPS):
        present = np.array([1, step % 3 != 0], np.uint8)
        grads = [rng.standard_normal(n).astype(np.float32) * (rng.random(n) < 0.8) for n in sizes]
        for param, grad, has in zip(params, grads, present, strict=True):
            param.grad = torch.from_numpy(grad) if has else None
        optimizer.step()
        group.update([(np.concatenate(grads), present, 5)], 5, LR)
    return group.values, np.concatenate([p.detach().numpy() for p in params])


def after_row_steps(rule, make):
    count, dim = 200, 33
    rng = np.random.default_rng(4)
    keys = rng.integers(-(2**63), 2**63 - 1, count)
    table = Table(TableSpec("t", dim, rule.spec(), init_rows.normal()), 0, range(SLOTS))
    weight = torch.nn.Parameter(torch.from_numpy(table.pull(keys, False)))
    optimizer = make([weight])
    for _ in range(STEPS):
        met = rng.permutation(count)[: rng.integers(1, 80)]
        grads = rng.standard_normal((met.size, dim)).astype(np.float32)
        theirs = decay_met(rule, weight, met, torch.from_numpy(grads))
        weight.grad = torch.sparse_coo_tensor(torch.from_numpy(met)[None], theirs, (count, dim))
        optimizer.step()
        table.update([(keys[met], grads, 5)], 5, LR)
    return table.pull(keys, False), weight.detach().numpy()


def decay_met(rule, weight, met, grads):
    """Weight decay of the rows met: decoupled at once, otherwise in the gradient that is returned."""
    decay = getattr(rule, "weight_decay", 0.0)
    with torch.no_grad():
        if isinstance(rule, AdamW):
            weight[met] = weight[met].mul_(1 - LR * decay)
        elif decay:
            return grads.add(weight[met], alpha=decay)
    return grads


def assert_close(ours, theirs):
    assert np.abs(ours - theirs).max() <= ULPS * np.spacing(np.abs(theirs).max())


def name_of(case):
    return repr(case) if not callable(case) else ""


@pytest.mark.parametrize(("rule", "make"), DENSE, ids=name_of)
@pytest.mark.usefixtures("exact_root")
def test_dense_rules_have_the_bits_of_torch_with_an_exact_root(rule, make):
    ours, theirs = after_dense_steps(rule, make)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("rule", "make"), SPARSE, ids=name_of)
@pytest.mark.usefixtures("exact_root")
def test_row_rules_have_the_bits_of_torch_with_an_exact_root(rule, make):
    ours, theirs = after_row_steps(rule, make)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(("rule", "make"), DENSE, ids=name_of)
def test_dense_rules_follow_torch_within_a_bound(rule, make):
    assert_close(*after_dense_steps(rule, make))


@pytest.mark.parametrize(("rule", "make"), SPARSE, ids=name_of)
def test_row_rules_follow_torch_within_a_bound(rule, make):
    assert_close(*after_row_steps(rule, make))


def test_sgd_has_the_bits_of_torch_as_it_is():
    cases = [after_dense_steps(*case) for case in DENSE if isinstance(case[0], SGD)]
    cases += [after_row_steps(*case) for case in SPARSE if isinstance(case[0], SGD)]
    assert len(cases) == 7
    for ours, theirs in cases:
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("rule", MOMENTUM, ids=repr)
def test_momentum_of_rows_has_the_bits_of_torch_with_a_parameter_for_each_row(rule):
    count, dim = 40, 19
    rng = np.random.default_rng(5)
    keys = rng.integers(-(2**63), 2**63 - 1, count)
    table = Table(TableSpec("t", dim, rule.spec(), init_rows.normal()), 0, range(SLOTS))
    rows = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in table.pull(keys, False)]
    options = {name: getattr(rule, name) for name in ("momentum", "dampening", "weight_decay", "nesterov")}
    optimizer = torch.optim.SGD(rows, LR, **options, foreach=False)
    for _ in range(STEPS):
        met = rng.permutation(count)[: rng.integers(1, 20)]
        grads = rng.standard_normal((met.size, dim)).astype(np.float32) * (rng.random((met.size, dim)) < 0.9)
        optimizer.zero_grad()
        for row, grad in zip(met, grads, strict=True):
            rows[row].grad = torch.from_numpy(grad)
        optimizer.step()
        table.update([(keys[met], grads, 5)], 5, LR)
    assert table.pull(keys, False).tobytes() == torch.stack(rows).detach().numpy().tobytes()


@pytest.mark.parametrize(
    "rule",
    [RowWiseAdagrad(), RowWiseAdagrad(lr_decay=0.1, weight_decay=0.05, initial_accumulator_value=0.3, eps=1e-4)],
)
@pytest.mark.parametrize("dim", [1, 5, 32])
def test_rowwise_adagrad_is_the_published_rule_row_by_row(rule, dim):
    count = 60
    rng = np.random.default_rng(6)
    keys = rng.integers(-(2**63), 2**63 - 1, count)
    table = Table(TableSpec("t", dim, rule.spec(), init_rows.normal()), 0, range(SLOTS))
    exact = table.pull(keys, False).astype(np.float64)
    sums = np.full(count, rule.initial_accumulator_value)
    for step in range(STEPS):
        met = rng.permutation(count)[: rng.integers(1, 30)]
        grads = rng.standard_normal((met.size, dim)).astype(np.float32)
        table.update([(keys[met], grads, 5)], 5, LR)
        g = grads + rule.weight_decay * exact[met]
        sums[met] += (g**2).mean(axis=1)
        exact[met] -= LR / (1 + step * rule.lr_decay) * g / (np.sqrt(sums[met]) + rule.eps)[:, None]
    assert_close(table.pull(keys, False), exact.astype(np.float32))


class PlainFTRL:
    """McMahan et al. 2013, algorithm 1, a coordinate at a time in float64, with any power of n."""

    def __init__(self, alpha, beta, l1, l2, power=0.5, n=0.0):
        self.alpha, self.beta, self.l1, self.l2, self.power = alpha, beta, l1, l2, power
        self.z, self.n = 0.0, n

    def begin(self, weight):
        """Choose z so that the weight is this."""
        scale = (self.beta + self.n**self.power) / self.alpha + self.l2
        self.z = -weight * scale - (self.l1 if weight > 0 else -self.l1 if weight < 0 else 0)

    def weight(self):
        if abs(self.z) <= self.l1:
            return 0.0
        sign = -1 if self.z < 0 else 1
        return -1 / ((self.beta + self.n**self.power) / self.alpha + self.l2) * (self.z - sign * self.l1)

    def step(self, g):
        sigma = ((self.n + g * g) ** self.power - self.n**self.power) / self.alpha
        self.z += g - sigma * self.weight()
        self.n += g * g


FTRLS = [
    FTRL(),
    FTRL(l1=1.5),
    FTRL(beta=0.5, l1=2.0, l2=0.7, initial_accumulator_value=0.1),
    FTRL(l1=1.0, lr_power=-0.7),
    FTRL(lr_power=0.0, l1=0.5),
]


@pytest.mark.parametrize("rule", FTRLS, ids=repr)
@pytest.mark.parametrize("initializer", [init_rows.zeros(), init_rows.normal(std=0.3)], ids=repr)
def test_ftrl_is_the_published_algorithm(rule, initializer):
    count, dim = 12, 3
    rng = np.random.default_rng(7)
    keys = rng.integers(-(2**63), 2**63 - 1, count)
    table = Table(TableSpec("t", dim, rule.spec(), initializer), 0, range(SLOTS))
    initial = table.pull(keys, False)
    group = DenseGroup(
        GroupSpec(GroupKind.TRAINED, rule.spec(), (ParameterSpec("p", (count * dim,), "float32"),)), range(count * dim)
    )
    group.set(initial.reshape(-1))

    def plain():
        made = [
            PlainFTRL(LR, rule.beta, rule.l1, rule.l2, -rule.lr_power, rule.initial_accumulator_value)
            for _ in range(count * dim)
        ]
        for one, weight in zip(made, initial.ravel().tolist(), strict=True):
            one.begin(weight)
        return np.array(made).reshape(count, dim)

    rows, dense = plain(), plain()
    slopes = rng.standard_normal((count, dim)) * 0.3
    for _ in range(STEPS):
        met = rng.permutation(count)[: rng.integers(1, count)]
        all_grads = (slopes + rng.standard_normal((count, dim))).astype(np.float32)
        table.update([(keys[met], all_grads[met], 5)], 5, LR)
        group.update([(all_grads.reshape(-1), np.ones(1, np.uint8), 5)], 5, LR)
        for row in met:
            for c in range(dim):
                rows[row, c].step(float(all_grads[row, c]))
        for one, g in zip(dense.ravel(), all_grads.ravel().tolist(), strict=True):
            one.step(g)
    for ours, theirs in ((table.pull(keys, False), rows), (group.values.reshape(count, dim), dense)):
        exact = np.vectorize(lambda one: one.weight())(theirs)
        assert np.abs(ours - exact).max() <= 2e-5 * max(np.abs(exact).max(), 1.0)
        sure = np.vectorize(lambda one: abs(abs(one.z) - one.l1) > 1e-3)(theirs)
        assert ((ours == 0) == (exact == 0))[sure].all()


def test_ftrl_keeps_weights_at_zero_until_their_gradients_amount_to_l1():
    table = Table(TableSpec("t", 2, FTRL(l1=1.0).spec(), init_rows.zeros()), 0, range(SLOTS))
    key = np.array([3])
    for _ in range(3):
        table.update([(key, np.array([[0.3, 0.5]], np.float32), 1)], 1, LR)
    first, second = table.pull(key, False)[0]
    assert first == 0.0
    assert second < 0.0


@pytest.mark.parametrize("rule", [FTRL(l1=0.5), FTRL(l1=0.5, lr_power=-0.4)])
def test_ftrl_begins_at_the_initial_value_and_a_zero_gradient_or_rate_leaves_it_there(rule):
    table = Table(TableSpec("t", 16, rule.spec(), init_rows.normal()), 0, range(SLOTS))
    keys = np.arange(50)
    initial = table.pull(keys, False)
    grads = np.random.default_rng(8).standard_normal((50, 16)).astype(np.float32)
    table.update([(keys, grads, 1)], 1, 0.0)
    assert table.pull(keys, False).tobytes() == initial.tobytes()
    table.update([(keys, np.zeros_like(grads), 1)], 1, LR)
    assert np.abs(table.pull(keys, False) - initial).max() < 1e-6
    table.update([(keys, grads, 1)], 1, LR)
    after = table.pull(keys, False)
    expected = initial - grads / ((1 + np.abs(grads.astype(np.float64)) ** (-2 * rule.lr_power)) / LR)
    kept = np.sign(expected) == np.sign(initial)
    assert np.abs(after - expected)[kept].max() < 1e-5


@pytest.mark.parametrize("rule", EVERY_RULE, ids=repr)
@pytest.mark.parametrize("dim", [1, 3, 16, 33, 100])
def test_an_element_of_a_row_does_not_depend_on_its_neighbours(rule, dim):
    rng = np.random.default_rng(dim)
    key = np.array([42])
    wide = Table(TableSpec("t", dim, rule.spec(), init_rows.normal()), 0, range(SLOTS))
    narrow = Table(TableSpec("t", 1, rule.spec(), init_rows.normal()), 0, range(SLOTS))
    for _ in range(10):
        grads = rng.standard_normal((1, dim)).astype(np.float32)
        wide.update([(key, grads, 1)], 1, LR)
        narrow.update([(key, grads[:, :1].copy(), 1)], 1, LR)
    assert wide.pull(key, False)[0, 0] == narrow.pull(key, False)[0, 0]
