"""Local steps against plain PyTorch and against averages and outer rules written out here.

The model has two tables, a bag with repeated words and a dense network; the reference begins with the same rows and
reads the same batches. Differences are rounded to float32 once, which is all that keeps results from being the same.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evergrad as eg
from evergrad.data.order import epoch_order
from evergrad.job.embedded import embedded_session
from evergrad.job.job import Job
from evergrad.kernels.initial import initial_rows, table_seed
from evergrad.messages import Schema
from evergrad.schedule import sync_steps, sync_task

SEED, SAMPLES, USERS, WORDS, BATCH, EPOCHS = 3, 500, 60, 40, 20, 2
TOLERANCE = 1e-5

INNER = {
    "sgd": (eg.SGD(lr=0.1), eg.SGD(lr=0.5), torch.optim.SGD, torch.optim.SGD),
    "adagrad": (eg.Adagrad(lr=0.05), eg.Adagrad(lr=0.1), torch.optim.Adagrad, torch.optim.Adagrad),
    "adam": (eg.Adam(lr=0.01), eg.Adam(lr=0.02), torch.optim.Adam, torch.optim.SparseAdam),
}


@pytest.fixture(autouse=True)
def _sparse_invariants():
    """Torch warns when nobody has said whether it shall check sparse tensors."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8 + 8 + 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, batch, user, words):
        x = torch.cat([user(batch["user"]), words(*batch["words"]), batch["x"]], dim=-1)
        return F.binary_cross_entropy_with_logits(self.net(x).squeeze(-1), batch["label"])


class OnPservers(Head):
    def __init__(self):
        super().__init__()
        self.user = eg.Embedding("user", 8, init=eg.init_rows.normal(std=0.3))
        self.words = eg.EmbeddingBag("words", 8, mode="mean", init=eg.init_rows.uniform(-0.5, 0.5))

    def forward(self, batch):
        return self.loss(batch, self.user, self.words)


class Plain(Head):
    """The same with tables of torch that begin with the same rows."""

    def __init__(self, other):
        super().__init__()
        self.net = copy.deepcopy(other.net)
        self.user = nn.Embedding(USERS, 8, sparse=True)
        self.words = nn.EmbeddingBag(WORDS, 8, mode="mean", sparse=True)
        for table, size in ((other.user, USERS), (other.words, WORDS)):
            rows = initial_rows(np.arange(size), 8, table.init, table_seed(SEED, table.table))
            getattr(self, table.table).weight.data = torch.from_numpy(rows)

    def forward(self, batch):
        return self.loss(batch, self.user, self.words)

    def optimizers(self, rules):
        dense = rules[2](self.net.parameters(), lr=rules[0].lr)
        return [dense, rules[3]([self.user.weight, self.words.weight], lr=rules[1].lr)]

    def values(self):
        return {name: parameter.detach().double().clone() for name, parameter in self.named_parameters()}

    def set_values(self, values):
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(values[name])


@pytest.fixture(scope="module")
def data():
    random = np.random.default_rng(SEED)
    words = [random.integers(0, WORDS, random.integers(0, 5)) for _ in range(SAMPLES)]
    columns = {
        "user": (USERS * random.random(SAMPLES) ** 2).astype(np.int64),
        "words": eg.data.Ragged.from_lists(words),
        "x": random.standard_normal((SAMPLES, 2), np.float32),
    }
    logit = columns["user"] % 7 - 3 + 3 * columns["x"][:, 0] + np.array([(w % 3 - 1).sum() for w in words])
    columns["label"] = (random.random(SAMPLES) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    return eg.data.Columns(columns)


def on_pservers(data, update, rules, pservers=1):
    """The model before training, the losses of its batches, and the tables and parameters it ends with."""
    torch.set_num_threads(1)
    local = update if isinstance(update, eg.LocalSGD) else None
    job = Job(embedded_session(pservers), Schema(SEED, update.spec(), (), ()), True, local=local)
    torch.manual_seed(SEED)
    model = OnPservers()
    before = copy.deepcopy(model)
    optimizer = job.optimizer(model, dense=rules[0], sparse=rules[1])
    losses = []
    for _ in job.epochs(EPOCHS):
        for batch in job.batches(data, BATCH):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return before, losses, final(job, model)


def final(job, model):
    found = {}

    def read(batch):
        found["user.weight"] = model.user(torch.arange(USERS)).double()
        found["words.weight"] = model.words(torch.arange(WORDS)[:, None]).double()
        found.update({f"net.{name}": p.detach().double().clone() for name, p in model.net.named_parameters()})
        return {}

    model.user.unseen = model.words.unseen = "initializer"
    job.evaluate(read, {"x": torch.ones(1)}, 1)
    return found


def rounds(update):
    """The batches of each task of each round of each epoch, as sample numbers."""
    steps, count = update.steps, update.tasks_per_round
    for epoch in range(EPOCHS):
        for step in range(sync_steps(SAMPLES, count, BATCH * steps)):
            tasks = (sync_task(SAMPLES, count, BATCH * steps, step, k) for k in range(count))
            orders = [epoch_order(SAMPLES, SEED, epoch, np.arange(*task)) for task in tasks]
            yield [[order[i : i + BATCH] for i in range(0, order.size, BATCH)] for order in orders if order.size]


def train_task(model, data, rules, batches, losses):
    """One task in plain torch, with optimizers that begin anew; which rows of the tables it met."""
    optimizers = model.optimizers(rules)
    met = {"user.weight": set(), "words.weight": set()}
    for samples in batches:
        batch = data.fetch(samples)
        met["user.weight"].update(batch["user"].tolist())
        met["words.weight"].update(batch["words"][0].tolist())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return met


def in_torch(before, data, update, rules):
    """The same with the averaging and the outer rule written out in float64; losses and final values.

    The outer momentum of a row moves in the rounds that meet it.
    """
    model, losses, momenta = Plain(before), [], {}
    for tasks in rounds(update):
        base, total = model.values(), sum(s.size for batches in tasks for s in batches)
        means = {name: torch.zeros_like(value) for name, value in base.items()}
        met = {name: set() for name in ("user.weight", "words.weight")}
        for batches in tasks:
            model.set_values(base)
            for name, rows in train_task(model, data, rules, batches, losses).items():
                met[name] |= rows
            weight = sum(s.size for s in batches) / total
            for name, value in model.values().items():
                means[name] += weight * (base[name] - value)
        for name, gradient in means.items():
            rows = sorted(met[name]) if name in met else slice(None)
            outer, momentum = update.outer, momenta.setdefault(name, torch.zeros_like(gradient))
            momentum[rows] = outer.momentum * momentum[rows] + gradient[rows]
            along = gradient[rows] + outer.momentum * momentum[rows] if outer.nesterov else momentum[rows]
            base[name][rows] -= outer.lr * along
        model.set_values(base)
    return losses, model.values()


def assert_same(found, wanted):
    assert len(found[0]) == len(wanted[0])
    np.testing.assert_allclose(found[0], wanted[0], rtol=TOLERANCE, atol=0)
    for name, value in wanted[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    assert np.mean(wanted[0][-10:]) < np.mean(wanted[0][:10]) - 0.01, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("pservers", [1, 2, 3])
@pytest.mark.parametrize("name", INNER)
def test_with_one_task_a_round_it_is_plain_torch_with_optimizers_made_anew_every_so_many_batches(data, name, pservers):
    """25 batches an epoch: the rounds are of 4 batches and, at the end of an epoch, of one."""
    update = eg.LocalSGD(steps=4)
    before, losses, values = on_pservers(data, update, INNER[name], pservers)
    model, wanted = Plain(before), []
    for (batches,) in rounds(update):
        train_task(model, data, INNER[name], batches, wanted)
    assert len(wanted) == 2 * 25
    assert_same((losses, values), (wanted, model.values()))


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("tasks", [2, 3])
def test_several_tasks_are_averaged_by_their_samples(data, name, tasks):
    """With 3 tasks the last of an epoch have 7, 7 and 6 samples."""
    update = eg.LocalSGD(steps=3, tasks_per_round=tasks)
    before, *found = on_pservers(data, update, INNER[name], 2)
    assert_same(found, in_torch(before, data, update, INNER[name]))


@pytest.mark.parametrize("outer", [
    eg.SGD(lr=0.5), eg.SGD(lr=0.7, momentum=0.5), eg.SGD(lr=0.7, momentum=0.9, nesterov=True),
])  # fmt: skip
@pytest.mark.parametrize("tasks", [1, 2])
def test_the_outer_rule_takes_the_mean_difference_for_its_gradient(data, outer, tasks):
    update = eg.LocalSGD(steps=4, tasks_per_round=tasks, outer=outer)
    before, *found = on_pservers(data, update, INNER["sgd"], 2)
    assert_same(found, in_torch(before, data, update, INNER["sgd"]))


def test_one_step_a_task_with_plain_gradient_descent_is_sync(data):
    """To about one rounding of a float32 a step: w - (w - w') is w' but for that of the difference."""
    rules = INNER["sgd"]
    for tasks in (1, 3):
        _, losses, values = on_pservers(data, eg.LocalSGD(steps=1, tasks_per_round=tasks), rules)
        _, same_losses, same_values = on_pservers(data, eg.Sync(tasks), rules)
        np.testing.assert_allclose(losses, same_losses, rtol=1e-6, atol=0)
        for name, value in same_values.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=50 * 2.0**-24, err_msg=name)


def test_inner_learning_rates_are_those_of_a_path_of_batches_and_outer_ones_those_of_rounds(data):
    """A rate that changes with every inner step, and one with every round, against rules with the same numbers."""
    asked = {"inner": [], "outer": []}

    def of(kind, rate):
        def function(step):
            asked[kind].append(step)
            return rate

        return function

    rules = (eg.SGD(lr=of("inner", 0.1)), eg.SGD(lr=0.5))
    update = eg.LocalSGD(steps=4, tasks_per_round=2, outer=eg.SGD(lr=of("outer", 1.0)))
    _, losses, _ = on_pservers(data, update, rules)
    _, same, _ = on_pservers(data, eg.LocalSGD(steps=4, tasks_per_round=2), INNER["sgd"])
    assert losses == same
    each = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]]  # 13 batches a stream
    path = [step for of_round in each for _ in range(2) for step in of_round]
    assert asked["inner"][1:] == path + [13 + step for step in path]
    rounds_asked = [step for step in range(8) for _ in range(2)]
    assert asked["outer"][-16:] == rounds_asked


@pytest.mark.parametrize("name", INNER)
def test_the_number_of_pservers_changes_no_bit(data, name):
    update = eg.LocalSGD(steps=3, tasks_per_round=2, outer=eg.SGD(lr=0.7, momentum=0.9, nesterov=True))
    (_, losses, values), *others = [on_pservers(data, update, INNER[name], pservers) for pservers in (1, 2, 5)]
    for _, same_losses, same_values in others:
        assert same_losses == losses
        assert all(torch.equal(same_values[n], value) for n, value in values.items())
