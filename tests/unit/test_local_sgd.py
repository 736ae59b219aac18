"""A script under `LocalSGD`: what its batches see, what counts, and what the pservers make of it."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.checkpoint.model import Model as SavedModel
from evergrad.errors import ConfigError
from evergrad.job.embedded import embedded_session
from evergrad.job.job import Job
from evergrad.messages import Request, Schema, Wire
from evergrad.trainer.driver import Leaving

DATA = {"n": torch.arange(20), "x": torch.ones(20, 1)}
ROW = torch.tensor([0])


class Model(nn.Module):
    """`w` and row 0 go down by one each step with SGD of learning rate 1."""

    def __init__(self, **table):
        super().__init__()
        self.t = eg.Embedding("t", 1, init=eg.init_rows.zeros(), unseen="initializer", **table)
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, ids=ROW):
        return self.w + self.t(ids).sum()


def begin(job, model=None, dense=eg.SGD(lr=1.0), sparse=eg.SGD(lr=1.0)):  # noqa: B008  # rules do not change
    model = Model() if model is None else model
    return model, job.optimizer(model, dense=dense, sparse=sparse)


def train_batch(model, optimizer, factor=1.0):
    optimizer.zero_grad()
    (factor * model()).backward()
    optimizer.step()


def loop(job, body, epochs=1, batch_size=4, data=DATA):
    for epoch in job.epochs(epochs):
        for number, batch in enumerate(job.batches(data, batch_size, shuffle=False)):
            body(epoch, number, batch)


def values(job, model):
    """The newest parameter and row 0."""
    found = job.evaluate(lambda batch: {"w": model.w, "row": model.t(ROW).sum()}, {"x": torch.ones(1)}, 1)
    return found["w"], found["row"]


def here(model):
    return model.w.item(), model.t(ROW).item()


def notes(job):
    master = job._session.driver._carrier.master
    return " ".join(master.status(Request(0), 0.0).notes)


# -- batches and rounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 2, 3, 7])
@pytest.mark.parametrize("steps", [1, 2, 5, 100])
@pytest.mark.parametrize("batch_size", [1, 3, 20, 100])
def test_every_sample_comes_once_an_epoch(new_job, steps, tasks, batch_size):
    job = new_job(update=eg.LocalSGD(steps, tasks))
    model, optimizer = begin(job)
    for _ in job.epochs(2):
        seen = []
        for batch in job.batches(DATA, batch_size):
            train_batch(model, optimizer)
            assert 1 <= len(batch["n"]) <= batch_size
            seen += batch["n"].tolist()
        assert sorted(seen) == list(range(20))


def test_a_task_is_the_next_batches_of_its_stream(new_job):
    job = new_job(update=eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job)
    seen = []

    def body(epoch, number, batch):
        train_batch(model, optimizer)
        seen.append(batch["n"].tolist())

    loop(job, body)
    assert seen == [
        [0, 1, 2, 3], [4, 5, 6, 7], [10, 11, 12, 13], [14, 15, 16, 17], [8, 9], [18, 19],
    ]  # fmt: skip


def test_a_batch_sees_the_steps_of_its_task_and_the_rounds_before_and_nothing_of_other_tasks(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job)
    seen = []

    def body(epoch, number, batch):
        seen.append(here(model))
        train_batch(model, optimizer)

    loop(job, body)
    assert seen == [(0, 0), (-1, -1), (0, 0), (-1, -1), (-2, -2), (-2, -2)]
    assert values(job, model) == (-3, -3)


def test_a_step_shows_at_once_in_parameters_and_rows(new_job):
    job = new_job(update=eg.LocalSGD(steps=3))
    model, optimizer = begin(job)
    seen = []

    def body(epoch, number, batch):
        train_batch(model, optimizer)
        seen.append(here(model))

    loop(job, body)
    assert seen == [(-n, -n) for n in range(1, 6)]


def test_a_round_weighs_tasks_by_their_samples(new_job, pservers):
    """7 samples are tasks of 3 and 4; the first has a batch more where batches have 2."""
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job)
    loop(job, lambda e, n, batch: train_batch(model, optimizer, batch["n"][0].item()), 1, 2, {"n": torch.arange(7)})
    mean = (3 * (0 + 2) + 4 * (3 + 5)) / 7
    assert values(job, model) == (pytest.approx(-mean), pytest.approx(-mean))


def test_a_row_that_one_task_of_a_round_meets_moves_by_its_share(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        optimizer.zero_grad()
        model(ROW if number < 2 else torch.tensor([1])).backward()
        optimizer.step()

    loop(job, body, 1, 5)
    assert values(job, model) == (-2.0, -1.0)


def test_rows_are_pulled_once_a_task(new_job, monkeypatch):
    job = new_job(update=eg.LocalSGD(steps=3))
    model, optimizer = begin(job)
    pulled, pull = [], job._session.trainer.pull

    def noted(generation, version, keys, groups, evaluating):
        pulled.append((version, [k.tolist() for _, k in keys], list(groups)))
        return pull(generation, version, keys, groups, evaluating)

    monkeypatch.setattr(job._session.trainer, "pull", noted)
    ids = torch.tensor([1, 2, 1, 3, 2, 4, 4, 1])

    def body(epoch, number, batch):
        optimizer.zero_grad()
        (model(batch["t"]) + model(torch.tensor([9]))).backward()
        optimizer.step()

    loop(job, body, 1, 2, {"t": ids})
    asked = [(version, keys[0] if keys else [], groups) for version, keys, groups in pulled]
    assert asked == [
        (0, [1, 2], [0]), (0, [9], []), (0, [3], []), (0, [4], []), (1, [4, 1], [0]), (1, [9], []),
    ]  # fmt: skip
    assert model.t.source is None


def test_what_a_script_writes_into_parameters_counts_in_its_batch_only(new_job):
    """As under `Sync`: what is trained is what rules make of gradients."""
    job = new_job(update=eg.LocalSGD(steps=2))
    model, optimizer = begin(job)
    seen = []

    def body(epoch, number, batch):
        seen.append(model.w.item())
        train_batch(model, optimizer)
        model.w.data += 100

    loop(job, body, 1, 10)
    assert seen == [0, -1]
    assert values(job, model) == (-2, -2)


def test_random_numbers_start_anew_for_every_batch_of_a_task(new_job):
    def drawn(update):
        job = new_job(update=update)
        model, optimizer = begin(job)
        found = []

        def body(epoch, number, batch):
            found.append((torch.rand(1).item(), np.random.rand()))
            train_batch(model, optimizer)

        loop(job, body, 2)
        return found

    found = drawn(eg.LocalSGD(steps=3))
    assert len(set(found)) == 10
    assert drawn(eg.LocalSGD(steps=2)) == found == drawn(eg.Sync())


# -- what does not count -----------------------------------------------------------------------------------------------


def test_a_batch_without_a_step_contributes_nothing_and_weighs_nothing(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        if number != 1:
            train_batch(model, optimizer, (3.0, 0, 1.0, 2.0)[number])

    with pytest.warns(UserWarning, match="was not called for a batch"):
        loop(job, body, 1, 5)
    mean = (5 * 3 + 10 * 3) / 15
    assert values(job, model) == (-mean, -mean)


def test_a_task_without_a_step_is_none_of_its_round(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        if number > 1:
            train_batch(model, optimizer)

    with pytest.warns(UserWarning, match="was not called for a batch"):
        loop(job, body, 1, 5)
    assert values(job, model) == (-2, -2)


@pytest.mark.parametrize("where", ["w", "row"])
def test_a_batch_with_a_gradient_that_is_no_number_is_left_out_and_the_rest_of_its_task_counts(
    new_job, pservers, where
):
    job = new_job(pservers, eg.LocalSGD(steps=5))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        optimizer.zero_grad()
        factors = {"w": 1.0, "row": 1.0, where: math.nan if number == 1 else 1.0}
        (factors["w"] * model.w + factors["row"] * model.t(ROW).sum()).backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="a batch was left out: NaN or infinity in the gradient of"):
        loop(job, body)
    assert values(job, model) == (-4, -4)


@pytest.mark.parametrize(("where", "what"), [("w", "of 'w'"), ("row", "of table 't'")])
def test_a_task_whose_difference_is_no_number_is_left_out_whole(new_job, pservers, where, what):
    job = new_job(pservers, eg.LocalSGD(steps=5))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        optimizer.zero_grad()
        factors = {"w": 1.0, "row": 1.0, where: 1.0 if epoch else 3e38}
        (factors["w"] * model.w + factors["row"] * model.t(ROW).sum()).backward()
        optimizer.step()

    with pytest.warns(UserWarning, match=f"batches of a task were left out: NaN or infinity in the difference {what}"):
        loop(job, body, 2)
    assert values(job, model) == (-5, -5)


def test_a_difference_too_large_for_the_wire_leaves_its_task_out(tmp_path):
    update = eg.LocalSGD(steps=2)
    job = Job(embedded_session(3), Schema(0, update.spec(), (), (), Wire.FLOAT16), True, local=update)
    model = eg.Embedding("t", 2)
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=1.0))

    def body(epoch, number, batch):
        optimizer.zero_grad()
        (model(batch["n"]) * (1e6 if number == 1 else 1.0)).sum().backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="NaN or infinity in the difference of table 't'"):
        loop(job, body, 1, 5)
    job.save_model(tmp_path / "model")
    assert sorted(SavedModel(tmp_path / "model").table("t")[0]) == list(range(10, 20))


# -- leaving early -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_leaving_in_the_middle_of_a_task_hands_in_the_steps_taken(new_job, pservers, last):
    job = new_job(pservers, eg.LocalSGD(steps=3))
    model, optimizer = begin(job)
    for epoch in job.epochs(2):
        for number, _ in enumerate(job.batches(DATA, 4)):
            train_batch(model, optimizer)
            if epoch == 0 and number == last:
                break
    assert values(job, model) == (-(last + 1) - 5, -(last + 1) - 5)


def test_leaving_before_a_step_hands_in_the_steps_before(new_job):
    job = new_job(update=eg.LocalSGD(steps=3))
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for number, _ in enumerate(job.batches(DATA, 4)):
            if number == 1:
                break
            train_batch(model, optimizer)
    assert values(job, model) == (-1, -1)
    for _ in job.epochs(1):
        for _ in job.batches(DATA, 4):
            break
    assert values(job, model) == (-1, -1)


def test_a_round_that_is_not_whole_when_the_epoch_is_left_counts_nothing(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job)
    for epoch in job.epochs(2):
        for number, _ in enumerate(job.batches(DATA, 3)):
            train_batch(model, optimizer)
            if epoch == 0 and number == 4:
                break
    assert values(job, model) == (-2 - 4, -2 - 4)


def test_what_a_script_raises_leaves_a_job_that_goes_on(new_job):
    job = new_job(update=eg.LocalSGD(steps=4))
    model, optimizer = begin(job)

    def fail():
        for _ in job.epochs(1):
            for number, _ in enumerate(job.batches(DATA, 4)):
                train_batch(model, optimizer)
                if number == 2:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert values(job, model) == (-3, -3)
    loop(job, lambda *_: train_batch(model, optimizer))
    assert values(job, model) == (-8, -8)


class Broken(torch.utils.data.Dataset):
    """Cannot read sample 13 at first."""

    is_broken = True

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if i == 13 and self.is_broken:
            self.is_broken = False
            raise OSError("disk")
        return {"n": i}


def test_what_a_dataset_raises_in_the_middle_of_a_task_goes_through_and_the_next_epoch_is_whole(new_job):
    job = new_job(update=eg.LocalSGD(steps=2))
    model, optimizer = begin(job)
    data = Broken()
    with pytest.raises(OSError, match="disk"):
        loop(job, lambda *_: train_batch(model, optimizer), data=data)
    before = values(job, model)[0]
    assert before == -2, "of the second task nothing counts"
    loop(job, lambda *_: train_batch(model, optimizer), data=data)
    assert values(job, model)[0] == before - 5


class Members:
    """In place of the thread that talks to the master: what it has heard of the job."""

    newest = None

    def turned(self):
        pass

    def silence_s(self):
        return 0.0


def test_who_is_told_to_leave_does_so_before_the_next_batch_of_its_task_and_hands_in_nothing(new_job):
    job = new_job(update=eg.LocalSGD(steps=5))
    model = nn.Linear(1, 1)
    optimizer = job.optimizer(model, dense=eg.SGD(lr=1.0))
    driver, seen, before = job._session.driver, [], model.bias.item()

    def body(epoch, number, batch):
        seen.append(number)
        optimizer.zero_grad()
        model(batch["x"]).sum().backward()
        optimizer.step()
        if number == 1:
            driver.heartbeats, driver.is_leaving = Members(), True

    with pytest.raises(Leaving):
        loop(job, body)
    driver.heartbeats = None
    assert seen == [0, 1]
    job.evaluate(lambda batch: {}, DATA, 20)
    assert model.bias.item() == before


# -- rules and rates ---------------------------------------------------------------------------------------------------


def steps_of(job, model, optimizer, epochs=1):
    rates = []

    def body(epoch, number, batch):
        rates.append([group["lr"] for group in optimizer.param_groups])
        train_batch(model, optimizer)

    loop(job, body, epochs)
    return rates


def test_inner_is_the_rule_of_what_has_no_other(new_job):
    job = new_job(update=eg.LocalSGD(steps=5, inner=eg.SGD(lr=2.0)))
    model = Model()
    optimizer = job.optimizer(model)
    assert steps_of(job, model, optimizer)[0] == [2.0, 2.0]
    assert values(job, model) == (-10, -10)


def test_rules_of_the_optimizer_go_before_inner_and_a_tables_own_before_both(new_job):
    for table, sparse, expected in (
        (None, None, 2.0),
        (None, eg.SGD(lr=3.0), 3.0),
        (eg.SGD(lr=4.0), eg.SGD(lr=3.0), 4),
    ):
        job = new_job(update=eg.LocalSGD(steps=5, inner=eg.SGD(lr=2.0)))
        model = Model(optimizer=table)
        optimizer = job.optimizer(model, dense={"w": eg.SGD(lr=1.0)}, sparse=sparse)
        steps_of(job, model, optimizer)
        assert values(job, model) == (-5, -5 * expected)


def test_without_inner_and_rules_it_is_said_what_to_give(new_job):
    with pytest.raises(ConfigError, match=r"parameter 'w' has no rule; give job.optimizer a dense= rule"):
        new_job(update=eg.LocalSGD(5)).optimizer(Model())
    with pytest.raises(ConfigError, match="table 't' has no rule"):
        new_job(update=eg.LocalSGD(5)).optimizer(Model(), dense=eg.SGD())


def test_the_outer_rule_moves_towards_the_average(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=5, outer=eg.SGD(lr=0.5, momentum=0.5, nesterov=True)))
    model, optimizer = begin(job)
    steps_of(job, model, optimizer, 2)
    first = 0.5 * (5 + 0.5 * 5)
    second = 0.5 * (5 + 0.5 * (0.5 * 5 + 5))
    assert values(job, model) == (-first - second, -first - second)


def test_another_rule_may_be_the_outer_one(new_job):
    """Adagrad's first step is one learning rate long, whatever the difference is."""
    job = new_job(update=eg.LocalSGD(steps=5, outer=eg.Adagrad(lr=0.25)))
    model, optimizer = begin(job)
    steps_of(job, model, optimizer)
    assert values(job, model) == (pytest.approx(-0.25), pytest.approx(-0.25))


def test_an_outer_learning_rate_is_that_of_the_round(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, outer=eg.SGD(lr=lambda step: 10.0**-step)))
    model, optimizer = begin(job)
    steps_of(job, model, optimizer)
    assert values(job, model)[0] == pytest.approx(-(2 + 0.2 + 0.01))


def test_inner_learning_rates_are_of_the_steps_of_a_path_of_tasks_over_all_epochs(new_job):
    job = new_job(update=eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job, dense=eg.SGD(lr=lambda step: float(step)))
    rates = [dense for dense, _ in steps_of(job, model, optimizer, 2)]
    assert rates == [0, 1, 0, 1, 2, 2, 3, 4, 3, 4, 5, 5]


def test_they_go_on_after_an_epoch_left_early_where_the_last_round_ended(new_job):
    job = new_job(update=eg.LocalSGD(steps=2))
    model, optimizer = begin(job, dense=eg.SGD(lr=lambda step: float(step)))
    rates = []
    for epoch in job.epochs(2):
        for number, _ in enumerate(job.batches(DATA, 4)):
            rates.append(optimizer.param_groups[0]["lr"])
            train_batch(model, optimizer)
            if epoch == 0 and number == 1:
                break
    assert rates == [0, 1, 2, 3, 4, 5, 6]


def test_a_learning_rate_set_in_a_group_holds_from_then_on(new_job):
    job = new_job(update=eg.LocalSGD(steps=3))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        train_batch(model, optimizer)
        optimizer.param_groups[0]["lr"] *= 0.5

    loop(job, body)
    assert values(job, model) == (-(1 + 0.5 + 0.25 + 0.125 + 0.0625), -5)


def test_clipping_acts_on_the_gradients_of_each_step(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=5))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        optimizer.zero_grad()
        (100 * model()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()

    loop(job, body)
    assert values(job, model) == (pytest.approx(-10), -500)


def test_two_steps_for_one_batch_are_refused(new_job):
    job = new_job(update=eg.LocalSGD(steps=5))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        train_batch(model, optimizer)
        with pytest.raises(ConfigError, match=r"called twice for one batch; .* or the batch size instead"):
            optimizer.step()

    loop(job, body)
    assert values(job, model) == (-5, -5)


def test_a_parameter_without_a_gradient_in_all_of_a_round_is_left_alone(new_job, pservers):
    """Its outer momentum too."""
    outer = eg.SGD(lr=1.0, momentum=0.5)
    job = new_job(pservers, eg.LocalSGD(steps=5, outer=outer))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        optimizer.zero_grad()
        (model() if epoch == 0 else model.t(ROW).sum()).backward()
        optimizer.step()

    loop(job, body, 2)
    assert values(job, model) == (-5, -5 - 7.5)


# -- state -------------------------------------------------------------------------------------------------------------


def test_inner_state_begins_empty_in_every_task(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model, optimizer = begin(job, dense=eg.SGD(lr=1.0, momentum=0.5), sparse=eg.SGD(lr=1.0, momentum=0.5))
    loop(job, lambda *_: train_batch(model, optimizer), 1, 5)
    assert values(job, model) == (-2.5, -2.5)
    assert "same bits" not in notes(job)


def test_inner_state_may_be_kept_and_the_job_says_what_that_costs(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, keep_inner_state=True))
    model, optimizer = begin(job, dense=eg.SGD(lr=1.0, momentum=0.5), sparse=eg.SGD(lr=1.0, momentum=0.5))
    loop(job, lambda *_: train_batch(model, optimizer), 1, 5)
    moved = 1 + 1.5 + 1.75 + 1.875
    assert values(job, model) == (-moved, -moved)
    assert "(keep_inner_state)" in notes(job)
    assert "the same bits cannot be promised" in notes(job)


def test_kept_state_is_that_of_keys_met_before_and_not_of_what_was_pulled(new_job):
    """As the bias correction of Adam, which counts steps: with one task a round nothing but rounding differs."""

    def losses(update):
        job = new_job(update=update)
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = job.optimizer(model, dense=eg.Adam(lr=0.1))
        found = []

        def body(epoch, number, batch):
            optimizer.zero_grad()
            loss = (model(batch["x"] * batch["n"][:, None]) - batch["n"][:, None] / 9).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())

        loop(job, body, 3)
        return found

    kept = losses(eg.LocalSGD(steps=2, keep_inner_state=True))
    np.testing.assert_allclose(kept, losses(eg.Sync()), rtol=1e-4)
    assert not np.allclose(losses(eg.LocalSGD(steps=2)), kept, rtol=1e-2)


# -- buffers and tables ------------------------------------------------------------------------------------------------


def test_buffers_are_averaged_as_they_are_at_the_end_of_each_task(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2, tasks_per_round=2))
    model = nn.Sequential(nn.BatchNorm1d(1, momentum=0.5), nn.Linear(1, 1))
    optimizer = job.optimizer(model, dense=eg.SGD(lr=0.0))

    def body(epoch, number, batch):
        optimizer.zero_grad()
        model(batch["n"].float()[:, None]).sum().backward()
        optimizer.step()

    loop(job, body, 1, 4, {"n": torch.arange(12)})
    job.evaluate(lambda batch: {}, DATA, 20)
    # streams 0..5 and 6..11; batches of means 1.5, 4.5 and 7.5, 10.5
    first, second = (1.5 / 2 + 4.5) / 2, (7.5 / 2 + 10.5) / 2
    assert model[0].running_mean.item() == pytest.approx((first + second) / 2)
    assert model[0].num_batches_tracked == 2


def test_a_batch_left_out_leaves_no_trace_in_the_buffers_of_its_task(new_job):
    def statistics(factors):
        job = new_job(update=eg.LocalSGD(steps=4))
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        optimizer = job.optimizer(model, dense=eg.SGD(lr=0.0))

        def body(epoch, number, batch):
            optimizer.zero_grad()
            (model(batch["n"].float()[:, None]).sum() * factors[number]).backward()
            if factors[number]:
                optimizer.step()

        loop(job, body, 1, 5)
        job.evaluate(lambda batch: {}, DATA, 20)
        return model[0].running_mean.item(), model[0].num_batches_tracked.item()

    mean, count = statistics([1, 1, 1, 1])
    assert count == 4
    with pytest.warns(UserWarning, match="left out"):
        without_nan = statistics([1, math.nan, 1, 1])
    with pytest.warns(UserWarning, match="was not called"):
        without_step = statistics([1, 0, 1, 1])
    assert without_nan == without_step
    assert without_nan[0] != mean
    assert without_nan[1] == 3


def test_a_key_counts_once_a_round_towards_min_count_and_is_trained_locally_before(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=5))
    model, optimizer = begin(job, Model(min_count=2))
    seen = []

    def body(epoch, number, batch):
        seen.append(model.t(ROW).item())
        train_batch(model, optimizer)

    loop(job, body, 2)
    assert seen == [0, -1, -2, -3, -4] * 2
    assert values(job, model)[1] == -5, "the difference of the second round was taken"


def test_rows_age_by_rounds(new_job, pservers, tmp_path):
    job = new_job(pservers, eg.LocalSGD(steps=2))
    model = Model(ttl=1)
    optimizer = job.optimizer(model, dense=eg.SGD(lr=1.0), sparse=eg.SGD(lr=1.0))

    def body(epoch, number, batch):
        optimizer.zero_grad()
        model(torch.tensor([number])).backward()
        optimizer.step()

    loop(job, body, 1, 2)
    job.save_model(tmp_path / "model")
    assert sorted(SavedModel(tmp_path / "model").table("t")[0]) == [6, 7, 8, 9], "met in the last two rounds"


def test_ids_of_padding_and_bags_are_trained_as_ever(new_job, pservers):
    job = new_job(pservers, eg.LocalSGD(steps=2))
    model = eg.EmbeddingBag("t", 1, mode="sum", init=eg.init_rows.zeros(), padding_idx=0, unseen="initializer")
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=1.0))

    def body(epoch, number, batch):
        optimizer.zero_grad()
        model(torch.tensor([[0, 1, 1], [2, 0, 0]])).sum().backward()
        optimizer.step()

    loop(job, body, 1, 10)
    found = job.evaluate(lambda batch: {"rows": model(torch.tensor([[1], [2]])).flatten()}, {"x": torch.ones(1)}, 1)
    assert found["rows"].tolist() == [-4, -2]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "sentence"),
    [
        (lambda: eg.LocalSGD(0), "LocalSGD: steps is 0; give a whole number of one or more"),
        (lambda: eg.LocalSGD(2.0), "LocalSGD: steps is 2.0"),
        (lambda: eg.LocalSGD(2, 0), "LocalSGD: tasks_per_round is 0"),
        (lambda: eg.LocalSGD(2, 100_000), "tasks_per_round is 100000; give at most 65,536"),
        (lambda: eg.LocalSGD(2, backup_after=-1), "LocalSGD: backup_after is -1; give seconds"),
        (lambda: eg.LocalSGD(2, inner=torch.optim.Adam), "LocalSGD: inner= is no rule but Adam; give eg.SGD"),
        (lambda: eg.LocalSGD(2, outer=None), "LocalSGD: outer= is no rule but NoneType"),
        (lambda: eg.LocalSGD(2, outer=0.7), "LocalSGD: outer= is no rule but float"),
        (lambda: eg.LocalSGD(2, inner=eg.RowWiseAdagrad()), "for tables only; give it as sparse= of job.optimizer"),
        (lambda: eg.LocalSGD(2, outer=eg.RowWiseAdagrad()), "outer= is RowWiseAdagrad, .* give eg.SGD"),
        (lambda: eg.LocalSGD(2, outer=eg.SGD(lr=0.7, nesterov=True)), "nesterov needs a momentum above zero"),
        (lambda: eg.LocalSGD(2, outer=eg.SGD(lr=-1.0)), "the learning rate for step 0 is -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_give(update, sentence):
    with pytest.raises(ConfigError, match=sentence):
        eg.init(update=update())


def test_init_takes_it(tmp_path):
    job = eg.init(update=eg.LocalSGD(steps=2, inner=eg.SGD(lr=1.0)))
    model = Model()
    optimizer = job.optimizer(model)
    steps_of(job, model, optimizer)
    assert values(job, model) == (-5, -5)


def test_a_gradient_of_a_frozen_parameter_is_refused(new_job):
    job = new_job(update=eg.LocalSGD(steps=2))
    model = nn.Linear(1, 1)
    model.bias.requires_grad = False
    optimizer = job.optimizer(model, dense=eg.SGD())
    model.bias.requires_grad = True

    def body(epoch, number, batch):
        model(batch["x"]).sum().backward()
        optimizer.step()

    with pytest.raises(ConfigError, match=r"'bias' was frozen when job\.optimizer was called"):
        loop(job, body)


def test_parameters_of_half_precision_take_steps_in_float32(new_job):
    """Each step is a tenth of what bfloat16 tells apart at 1."""
    job = new_job(update=eg.LocalSGD(steps=20))
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    model.weight.data.fill_(1.0)
    optimizer = job.optimizer(model, dense=eg.SGD(lr=2.0**-10))

    def body(epoch, number, batch):
        optimizer.zero_grad()
        model(batch["x"].bfloat16()).sum().backward()
        optimizer.step()

    loop(job, body, 1, 1)
    job.evaluate(lambda batch: {}, DATA, 20)
    assert model.weight.item() == pytest.approx(1 - 20 * 2.0**-10, abs=2.0**-8)
