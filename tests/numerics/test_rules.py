"""The rules against `torch.optim`, for hundreds of steps.

SGD has torch's bits. Torch's float32 square root on CPU is not always the correctly rounded one, ours is; so Adagrad
and the Adams are checked twice: to the bit with a correctly rounded root put into torch, and as torch is
within a bound.
"""

import numpy as np
import pytest
import torch

from evergrad import init_rows
from evergrad.messages import GroupKind, GroupSpec, ParameterSpec, TableSpec
from evergrad.optim import SGD, Adagrad, Adam
from evergrad.placement import SLOTS
from evergrad.pserver.dense import DenseGroup
from evergrad.pserver.table import Table

STEPS = 300
LR = 0.05
ULPS = 64
"""Bound on the drift from torch after STEPS steps: units in the last place of the largest value (about 1e-5 of it)."""

DENSE = [
    (SGD(), lambda p: torch.optim.SGD(p, lr=LR, foreach=False)),
    (Adagrad(initial_accumulator_value=0.1), lambda p: torch.optim.Adagrad(p, LR, 0, 0, 0.1, foreach=False)),
    (Adagrad(eps=1e-3), lambda p: torch.optim.Adagrad(p, LR, eps=1e-3, foreach=False)),
    (Adam(), lambda p: torch.optim.Adam(p, LR, foreach=False)),
    (Adam(betas=(0.8, 0.9), eps=1e-3), lambda p: torch.optim.Adam(p, LR, (0.8, 0.9), 1e-3, foreach=False)),
]
SPARSE = [
    (SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
    (Adagrad(initial_accumulator_value=0.1), lambda p: torch.optim.Adagrad(p, LR, 0, 0, 0.1)),
    (Adagrad(), lambda p: torch.optim.Adagrad(p, LR)),
    (Adam(), lambda p: torch.optim.SparseAdam(p, LR)),
    (Adam(betas=(0.8, 0.9), eps=1e-3), lambda p: torch.optim.SparseAdam(p, LR, (0.8, 0.9), 1e-3)),
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
        weight.grad = torch.sparse_coo_tensor(torch.from_numpy(met)[None], torch.from_numpy(grads), (count, dim))
        optimizer.step()
        table.update([(keys[met], grads, 5)], 5, LR)
    return table.pull(keys, False), weight.detach().numpy()


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
    for ours, theirs in (after_dense_steps(*DENSE[0]), after_row_steps(*SPARSE[0])):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("rule", [SGD(), Adagrad(), Adam()])
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
