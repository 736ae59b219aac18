"""Asynchronous tasks in one process: batches pushed in groups, pulled now and then, and read ahead."""

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.checkpoint.model import Model as SavedModel
from evergrad.errors import DataError
from evergrad.job.embedded import embedded_session
from evergrad.job.job import Job
from evergrad.messages import MayBegin, Pull, PushBatch, Schema, Wire


class Model(nn.Module):
    """`w` and rows of `t`, all zero at first. The gradient of `w` is the batch's mean of x; of row k, of its x's."""

    def __init__(self):
        super().__init__()
        self.t = eg.Embedding("t", 1, init=eg.init_rows.zeros(), unseen="initializer", feature="k")
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return (batch["x"] * (self.w + self.t(batch["k"]).squeeze(-1))).mean()


def data(x, k=None):
    return {"x": torch.tensor(x, dtype=torch.float32), "k": torch.tensor(k if k is not None else [0] * len(x))}


def begin(update, model=None, dense=None, pservers=1, wire="float32", is_ahead=False, message_bytes=1 << 20):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    schema = Schema(0, update.spec(), (), (), Wire(wire))
    job = Job(embedded_session(pservers, message_bytes), schema, True, is_ahead)
    model = Model() if model is None else model
    return job, model, job.optimizer(model, dense=dense or eg.SGD(lr=1.0), sparse=eg.SGD(lr=1.0))


def watch(job, kind):
    """All messages of a kind that the job's trainer sends from now on, without those of evaluations."""
    carrier, found = job._session.driver._carrier, []
    exchange = carrier.exchange

    def noted(sends, timeout_s):
        sends = list(sends)
        found.extend(s.message for s in sends if isinstance(s.message, kind))
        return exchange(sends, timeout_s)

    carrier.exchange = noted
    return found


def train(job, model, optimizer, samples, batch_size=1, epochs=1, each=lambda number: None, skip=None):
    """Train in order, without a step for batch `skip`; `each` is told each batch's number before its backward pass."""
    for _ in job.epochs(epochs):
        for number, batch in enumerate(job.batches(samples, batch_size, shuffle=False)):
            optimizer.zero_grad()
            loss = model(batch)
            each(number)
            loss.backward()
            if number != skip:
                optimizer.step()


def weight(job, model):
    return job.evaluate(lambda batch: {"w": model.w}, {"x": torch.ones(1)}, 1)["w"]


# -- push_every --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("pservers", [1, 2, 3])
def test_batches_of_a_group_are_one_update_with_the_mean_over_their_samples(pservers, is_ahead):
    job, model, optimizer = begin(eg.Async(8, push_every=3), pservers=pservers, is_ahead=is_ahead)
    pushes = watch(job, PushBatch)
    train(job, model, optimizer, data([1.0, 1, 4, 4, 7, 10, 16], [1, 1, 2, 2, 1, 3, 3]), batch_size=2)
    assert [(p.batch, p.batches) for p in pushes[::pservers]] == [(0, 3), (3, 1)]
    assert weight(job, model) == -((1 * 2 + 4 * 2 + 8.5 * 2) / 6 + 16)
    rows = job.evaluate(lambda batch: {"r": model.t(torch.tensor([1, 2, 3])).flatten()}, {"x": torch.ones(1)}, 1)["r"]
    np.testing.assert_allclose(rows, [-(2 * 1 + 2 * 3.5) / 6, -(2 * 4) / 6, -(2 * 5) / 6 - 16], rtol=1e-6)


def test_groups_are_counted_from_the_beginning_of_each_task():
    job, model, optimizer = begin(eg.Async(5, push_every=2))
    pushes = watch(job, PushBatch)
    train(job, model, optimizer, data([1.0] * 7), epochs=2)
    groups = [(0, 0, 2), (0, 2, 2), (0, 4, 1), (1, 0, 2)]
    assert [(p.epoch, p.task, p.batch, p.batches) for p in pushes] == [(e, *g) for e in range(2) for g in groups]
    assert weight(job, model) == -8.0


def test_the_learning_rate_of_a_group_is_that_of_its_first_batch_that_contributes():
    asked = []
    job, model, optimizer = begin(eg.Async(4, push_every=2), dense=eg.SGD(lr=lambda step: float(10**step)))
    train(job, model, optimizer, data([1.0] * 4), each=lambda number: asked.append(optimizer.param_groups[0]["lr"]))
    assert asked == [1.0, 10.0, 100.0, 1000.0]
    assert weight(job, model) == -101.0


def test_a_batch_that_contributes_nothing_counts_as_done_and_its_samples_are_not_in_the_mean():
    job, model, optimizer = begin(eg.Async(4, push_every=4), dense=eg.SGD(lr=lambda step: float(step)))
    pushes = watch(job, PushBatch)
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) was not called|NaN or infinity"):
        train(job, model, optimizer, data([1.0, np.nan, 3, 5]), skip=0)
    assert [(p.batch, p.batches) for p in pushes] == [(0, 4)]
    assert weight(job, model) == -(3 + 5) / 2 * 2


def test_a_group_in_which_no_batch_contributes_is_pushed_empty():
    job, model, optimizer = begin(eg.Async(4, push_every=2))
    pushes = watch(job, PushBatch)
    with pytest.warns(UserWarning, match="NaN or infinity"):
        train(job, model, optimizer, data([np.nan, np.nan, 3, 5]))
    assert [(p.batch, p.batches, len(p.tables), len(p.groups)) for p in pushes] == [(0, 2, 0, 0), (2, 2, 1, 1)]
    assert weight(job, model) == -4.0


def test_a_loop_left_in_the_middle_of_a_group_pushes_nothing_of_it():
    job, model, optimizer = begin(eg.Async(8, push_every=3))
    for epoch in job.epochs(2):
        for number, batch in enumerate(job.batches(data([1.0] * 8), 1, shuffle=False)):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            if epoch == 0 and number == 4:
                break
    assert weight(job, model) == -1.0 - 3.0


def test_rows_evicted_in_a_batch_go_with_its_groups_update(tmp_path):
    job, model, optimizer = begin(eg.Async(4, push_every=2))

    def each(number):
        if number == 2:
            job.evict("t", torch.tensor([0, 1]))

    train(job, model, optimizer, data([1.0] * 4, [0, 1, 2, 3]), each=each)
    job.save_model(tmp_path / "model")
    assert sorted(SavedModel(tmp_path / "model").table("t")[0].tolist()) == [2, 3]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_the_model_is_the_same_for_any_number_of_pservers_and_however_messages_are_cut(tmp_path, wire):
    digests = []
    for pservers, message_bytes in ((1, 1 << 20), (3, 1 << 20), (2, 100)):
        torch.manual_seed(0)
        model = nn.Sequential(eg.Embedding("user", 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        update = eg.Async(6, push_every=2, pull_every=3)
        job, model, optimizer = begin(update, model, eg.Adam(lr=0.01), pservers, wire, False, message_bytes)
        rng = np.random.default_rng(0)
        samples = {"user": rng.integers(0, 90, 300), "y": rng.random(300, dtype=np.float32)}
        for _ in job.epochs(2):
            for batch in job.batches(samples, 16):
                optimizer.zero_grad()
                (model(batch["user"]).squeeze(-1) - batch["y"]).square().mean().backward()
                optimizer.step()
        job.save_model(tmp_path / "model")
        digests.append(b"".join(p.read_bytes() for p in sorted((tmp_path / "model").rglob("*")) if p.is_file()))
    assert digests[0] == digests[1] == digests[2]


def test_one_task_a_group_pulled_once_is_gradient_accumulation_in_torch():
    rng = np.random.default_rng(1)
    samples = {"x": rng.normal(size=(48, 3)).astype(np.float32), "y": rng.normal(size=48).astype(np.float32)}
    job, model, optimizer = begin(eg.Async(4, push_every=4, pull_every=4), nn.Linear(3, 1), eg.Adam(lr=0.05))
    reference = nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    for _ in job.epochs(2):
        for batch in job.batches(samples, 4, shuffle=False):
            optimizer.zero_grad()
            (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean().backward()
            optimizer.step()
    adam = torch.optim.Adam(reference.parameters(), lr=0.05)
    for _ in range(2):
        for start in range(0, 48, 16):
            adam.zero_grad()
            for at in range(start, start + 16, 4):
                x, y = (torch.from_numpy(samples[name][at : at + 4]) for name in ("x", "y"))
                ((reference(x).squeeze(-1) - y).square().mean() / 4).backward()
            adam.step()
    found = job.evaluate(lambda batch: {"w": model.weight, "b": model.bias}, {"x": torch.ones(1)}, 1)
    np.testing.assert_allclose(found["w"], reference.weight.detach().numpy(), rtol=2e-6)
    np.testing.assert_allclose(found["b"], reference.bias.detach().numpy(), rtol=2e-6)


# -- pull_every --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_batch_finds_what_was_pulled_last(is_ahead):
    seen = []
    job, model, optimizer = begin(eg.Async(7, pull_every=3), is_ahead=is_ahead)
    pulls = watch(job, Pull)
    train(
        job, model, optimizer, data([1.0] * 7, [5] * 7),
        each=lambda number: seen.append((model.w.item(), model.t(torch.tensor([5])).item())),
    )  # fmt: skip
    when = [0, 0, 0, 3, 3, 3, 6]
    lag = int(is_ahead)  # a batch read ahead was pulled before the one before it was pushed
    assert seen == [(-max(n - lag, 0.0), -max(n - lag, 0.0)) for n in when]
    assert len(pulls) == 3
    assert weight(job, model) == -7.0


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("pservers", [1, 3])
def test_rows_met_for_the_first_time_are_pulled_and_those_here_are_not(pservers, is_ahead):
    job, model, optimizer = begin(eg.Async(6, pull_every=3), pservers=pservers, is_ahead=is_ahead)
    pulls = watch(job, Pull)
    train(job, model, optimizer, data([1.0] * 6, [1, 2, 1, 1, 1, 3]))
    keys = [
        sorted(k for p in pulls[i : i + pservers] for t in p.tables for k in t.keys.tolist())
        for i in range(0, len(pulls), pservers)
    ]
    assert keys == [[1], [2], [1], [3]]
    dense = [any(g.stop for p in pulls[i : i + pservers] for g in p.groups) for i in range(0, len(pulls), pservers)]
    assert dense == [True, False, True, False]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_rows_met_only_in_forward_are_held_too(is_ahead):
    class Hidden(Model):
        def forward(self, batch):
            return (batch["x"] * (self.w + self.t(batch["other"]).squeeze(-1))).mean()

    samples = {"x": torch.ones(6), "other": torch.tensor([1, 2, 1, 1, 2, 9])}
    job, model, optimizer = begin(eg.Async(6, pull_every=3), Hidden(), is_ahead=is_ahead)
    pulls = watch(job, Pull)
    train(job, model, optimizer, samples)
    keys = [t.keys.tolist() for p in pulls for t in p.tables]
    assert sorted(keys) == [[1], [1], [2], [2], [9]]
    rows = job.evaluate(lambda batch: {"r": model.t(torch.tensor([1, 2, 9])).flatten()}, {"x": torch.ones(1)}, 1)["r"]
    assert rows.tolist() == [-3.0, -2.0, -1.0]


def test_a_row_in_a_batch_and_in_the_next_one_read_ahead_is_pulled_once():
    job, model, optimizer = begin(eg.Async(4, pull_every=4), is_ahead=True)
    pulls = watch(job, Pull)
    train(job, model, optimizer, data([1.0] * 8, [1, 2, 2, 3, 1, 3, 4, 4]), batch_size=2)
    assert [t.keys.tolist() for p in pulls for t in p.tables] == [[1, 2], [3], [4]]


def train_norm(job, model, optimizer, x, batch_size):
    for _ in job.epochs(1):
        for batch in job.batches({"x": x}, batch_size, shuffle=False):
            optimizer.zero_grad()
            model(batch["x"]).mean().backward()
            optimizer.step()


def norm(job, model):
    """The mean that a BatchNorm has kept, and of how many batches."""
    buffers = {"mean": model[0].running_mean, "count": model[0].num_batches_tracked}
    found = job.evaluate(lambda batch: buffers, {"x": torch.ones(1)}, 1)
    return found["mean"], found["count"]


@pytest.mark.parametrize(("push_every", "pull_every"), [(1, 1), (1, 4), (2, 4), (4, 4)])
def test_buffers_go_on_from_batch_to_batch_and_the_last_write_stands(push_every, pull_every):
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32))
    update = eg.Async(4, push_every=push_every, pull_every=pull_every)
    job, model, optimizer = begin(update, nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), eg.SGD(lr=0.0))
    train_norm(job, model, optimizer, x, 4)
    reference = nn.BatchNorm1d(3)
    for at in range(0, 32, 4):
        reference(x[at : at + 4])
    mean, count = norm(job, model)
    np.testing.assert_allclose(mean, reference.running_mean.numpy(), rtol=1e-6)
    assert count == 8


def test_with_fewer_pushes_than_pulls_buffers_begin_where_the_pservers_have_them():
    update = eg.Async(4, push_every=4, pull_every=2)
    job, model, optimizer = begin(update, nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)), eg.SGD(lr=0.0))
    train_norm(job, model, optimizer, torch.arange(16.0).reshape(16, 1), 2)
    assert norm(job, model)[1] == 4, "two of each group"


def test_a_batch_left_out_leaves_no_buffers_to_the_next():
    net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    job, model, optimizer = begin(eg.Async(4, pull_every=4), net, eg.SGD(lr=0.0))
    x = torch.tensor([[1.0], [2.0], [np.nan], [1.0], [3.0], [4.0], [5.0], [6.0]])
    with pytest.warns(UserWarning, match="a batch was left out: NaN or infinity"):
        train_norm(job, model, optimizer, x, 2)
    assert norm(job, model)[1] == 3


def test_an_evaluation_between_epochs_reads_the_newest_and_the_next_task_pulls_anew():
    seen = []
    job, model, optimizer = begin(eg.Async(4, pull_every=4))
    for _ in job.epochs(2):
        for batch in job.batches(data([1.0] * 4), 1, shuffle=False):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            seen.append(model.w.item())
        seen.append(weight(job, model))
    assert seen == [0.0] * 4 + [-4.0] + [-4.0] * 4 + [-8.0]


# -- bounded staleness, and data that cannot be read -------------------------------------------------------------------


@pytest.mark.parametrize("is_ahead", [False, True])
def test_under_bounded_staleness_each_batch_is_asked_for(is_ahead):
    job, model, optimizer = begin(eg.Async(3, max_staleness=0), is_ahead=is_ahead)
    asked = watch(job, MayBegin)
    train(job, model, optimizer, data([1.0] * 5))
    assert [a.done for a in asked] == [0, 1, 2, 0, 1]
    assert weight(job, model) == -5.0


def test_without_it_nobody_is_asked():
    job, model, optimizer = begin(eg.Async(3))
    asked = watch(job, MayBegin)
    train(job, model, optimizer, data([1.0] * 5))
    assert asked == []


class Bad:
    """Data of which sample 3 cannot be read."""

    def __len__(self):
        return 6

    def fingerprint(self):
        return "bad"

    def fetch(self, ids):
        if 3 in ids:
            raise DataError("row 3 of data.parquet cannot be read")
        return {"x": torch.ones(len(ids)), "k": torch.from_numpy(ids)}


@pytest.mark.parametrize("is_ahead", [False, True])
def test_data_that_cannot_be_read_raises_where_it_is_read_and_the_batches_before_are_applied(is_ahead):
    job, model, optimizer = begin(eg.Async(6), is_ahead=is_ahead)
    with pytest.raises(DataError, match="row 3"):
        train(job, model, optimizer, Bad())
    assert job._session.task.batches == 3
    assert weight(job, model) == -3.0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_reading_raises_once_is_raised_and_not_passed_over_by_reading_again(is_ahead):
    class Once(Bad):
        def fetch(self, ids):
            if 3 in ids and not self.raised:
                self.raised = True
                raise DataError("row 3")
            return {"x": torch.ones(len(ids)), "k": torch.from_numpy(ids)}

    job, model, optimizer = begin(eg.Async(6), is_ahead=is_ahead)
    data = Once()
    data.raised = False
    with pytest.raises(DataError, match="row 3"):
        train(job, model, optimizer, data)


@pytest.mark.parametrize("update", [eg.Sync(2), eg.Async(2), eg.Async(2, push_every=2)])
def test_what_the_script_raises_in_one_process_reaches_the_user_and_names_the_task(update):
    job, model, optimizer = begin(update)

    def each(number):
        if number == 3:
            raise KeyError("movie")

    with pytest.raises(KeyError, match="movie"):
        train(job, model, optimizer, data([1.0] * 6), each=each)
    assert job._session.task is not None
    weight(job, model)
    assert job._session.task is None
