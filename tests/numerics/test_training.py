"""Whole training runs against plain PyTorch: same initial rows, same batches, same rules, so the same losses."""

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

SEED, SAMPLES, USERS, WORDS, BATCH = 11, 1000, 60, 40, 40
STEPS = 50
"""Two epochs of 25 steps of 40 samples."""
TOLERANCE = 1e-5

RULES = {
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

    def forward(self, batch, user, words):
        x = torch.cat([user(batch["user"]), words(*batch["words"]), batch["x"]], dim=-1)
        return F.binary_cross_entropy_with_logits(self.net(x).squeeze(-1), batch["label"])


class OnPservers(Head):
    def __init__(self):
        super().__init__()
        self.user = eg.Embedding("user", 8, init=eg.init_rows.normal(std=0.3))
        self.words = eg.EmbeddingBag("words", 8, mode="mean", init=eg.init_rows.uniform(-0.5, 0.5))

    def forward(self, batch):
        return super().forward(batch, self.user, self.words)


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
        return super().forward(batch, self.user, self.words)


def dataset():
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


def on_pservers(data, rules, pservers, batches_per_step, batch_size, epochs):
    """The model before training, and the loss of each step."""
    torch.set_num_threads(1)
    job = Job(embedded_session(pservers), Schema(SEED, eg.Sync(batches_per_step).spec(), (), ()), True)
    torch.manual_seed(SEED)
    model = OnPservers()
    before = copy.deepcopy(model)
    optimizer = job.optimizer(model, dense=rules[0], sparse=rules[1])
    losses = []
    for _ in job.epochs(epochs):
        for batch in job.batches(data, batch_size):
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), len(batch["user"])))
    return before, losses


def in_torch(before, data, rules, batches_per_step, batch_size, epochs):
    """The losses of plain torch with the batches of a step concatenated."""
    model = Plain(before)
    dense = rules[2](model.net.parameters(), lr=rules[0].lr)
    sparse = rules[3]([model.user.weight, model.words.weight], lr=rules[1].lr)
    losses = []
    for epoch in range(epochs):
        for step in range(sync_steps(SAMPLES, batches_per_step, batch_size)):
            tasks = [sync_task(SAMPLES, batches_per_step, batch_size, step, k) for k in range(batches_per_step)]
            positions = np.concatenate([np.arange(*task) for task in tasks])
            batch = data.fetch(epoch_order(SAMPLES, SEED, epoch, positions))
            dense.zero_grad()
            sparse.zero_grad()
            loss = model(batch)
            loss.backward()
            dense.step()
            sparse.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("pservers", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_with_one_batch_a_step_the_losses_follow_plain_torch(name, pservers):
    rules, data = RULES[name], dataset()
    before, found = on_pservers(data, rules, pservers, 1, BATCH, 2)
    wanted = in_torch(before, data, rules, 1, BATCH, 2)
    assert len(found) == len(wanted) == STEPS
    np.testing.assert_allclose([loss for loss, _ in found], wanted, rtol=TOLERANCE, atol=0)
    assert np.mean(wanted[-10:]) < np.mean(wanted[:10]) - 0.01, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize("pservers", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_with_four_batches_a_step_the_losses_are_those_of_the_batches_in_one(name, pservers):
    """The last step of an epoch has batches of 10 samples, and the mean is still over samples."""
    rules, data = RULES[name], dataset()
    before, found = on_pservers(data, rules, pservers, 4, 20, 4)
    wanted = in_torch(before, data, rules, 4, 20, 4)
    steps = np.array(found).reshape(-1, 4, 2)
    losses = (steps[:, :, 0] * steps[:, :, 1]).sum(1) / steps[:, :, 1].sum(1)
    assert len(wanted) == 52
    np.testing.assert_allclose(losses, wanted, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("name", RULES)
def test_the_number_of_pservers_changes_no_bit_of_a_loss(name):
    runs = [on_pservers(dataset(), RULES[name], pservers, 3, 20, 1)[1] for pservers in (1, 2, 3, 5)]
    assert runs[1:] == runs[:1] * 3
