"""The optimizer of a job is used as any optimizer of torch."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.errors import ConfigError

DATA = {"t": torch.arange(12), "x": torch.ones(12, 1)}


class Model(nn.Module):
    """A table and a parameter, both zero at first; the gradient of each is 1 for every batch."""

    def __init__(self):
        super().__init__()
        self.t = eg.Embedding("t", 1, init=eg.init_rows.zeros(), unseen="initializer")
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return self.w + self.t(torch.zeros_like(batch["t"][:1])).sum()


def begin(job, dense=None, sparse=None):
    model = Model()
    return model, job.optimizer(model, dense=dense or eg.SGD(lr=1.0), sparse=sparse or eg.SGD(lr=1.0))


def values(job, model):
    """The newest parameter and row 0."""
    found = job.evaluate(lambda batch: {"w": model.w, "row": model.t(torch.tensor([0])).sum()}, {"x": torch.ones(1)}, 1)
    return found["w"], found["row"]


def steps(job, model, optimizer, epochs=1, batch_size=4, each=lambda batch: None):
    for _ in job.epochs(epochs):
        for batch in job.batches(DATA, batch_size):
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            each(batch)


def loop(job, body, epochs=1, batch_size=4):
    for epoch in job.epochs(epochs):
        for number, batch in enumerate(job.batches(DATA, batch_size)):
            body(epoch, number, batch)


# -- an optimizer of torch ---------------------------------------------------------------------------------------------


def test_it_is_an_optimizer_of_torch_with_a_group_for_each_rule_and_table(new_job):
    model, optimizer = begin(new_job(), eg.SGD(lr=0.5), eg.Adam(lr=0.25))
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert [(len(g["params"]), g.get("table"), g["lr"]) for g in optimizer.param_groups] == [
        (1, None, 0.5),
        (0, "t", 0.25),
    ]
    assert optimizer.param_groups[0]["params"][0] is model.w


def test_it_can_be_printed_and_its_state_dict_saved_and_loaded(new_job):
    _, optimizer = begin(new_job())
    assert "lr: 1.0" in repr(optimizer)
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 3.0
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_further_parameters_are_refused(new_job):
    _, optimizer = begin(new_job())
    with pytest.raises(ConfigError, match=r"takes no further parameters; give job.optimizer the whole model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_clipping_of_gradients_acts_on_the_parameters(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for batch in job.batches(DATA, 12):
            optimizer.zero_grad()
            (100 * model(batch)).backward()
            nn.utils.clip_grad_value_(model.parameters(), 2.0)
            optimizer.step()
    assert values(job, model) == (-2.0, -100.0)


# -- learning rates ----------------------------------------------------------------------------------------------------


def test_a_number_is_the_learning_rate_of_all_steps(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job, eg.SGD(lr=0.5), eg.SGD(lr=0.25))
    steps(job, model, optimizer, 2)
    assert values(job, model) == (-3.0, -1.5)


def test_a_function_of_the_step_is_asked_for_every_step_from_0_on_across_epochs(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job, eg.SGD(lr=lambda step: 10.0**step), eg.SGD(lr=lambda step: float(step)))
    seen = []
    steps(job, model, optimizer, 2, each=lambda _: seen.append([g["lr"] for g in optimizer.param_groups]))
    assert seen == [[10.0**step, step] for step in range(6)]
    assert values(job, model) == (-111111.0, -15.0)


def test_the_tasks_of_a_step_have_one_learning_rate(new_job):
    job = new_job(update=eg.Sync(3))
    model, optimizer = begin(job, eg.SGD(lr=lambda step: float(step + 1)))
    seen = []
    steps(job, model, optimizer, 2, 2, each=lambda _: seen.append(optimizer.param_groups[0]["lr"]))
    assert seen == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert values(job, model)[0] == -10.0


def test_a_learning_rate_set_in_a_group_holds_from_then_on(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)

    def change(_):
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[1]["lr"] = 0.0

    steps(job, model, optimizer, each=change)
    assert values(job, model) == (-1.75, -1.0)


def test_a_scheduler_of_torch_sets_the_learning_rates_of_parameters_and_tables(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job, eg.SGD(lr=1.0), eg.SGD(lr=2.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    steps(job, model, optimizer, each=lambda _: scheduler.step())
    assert values(job, model) == (-1.75, -3.5)
    assert scheduler.get_last_lr() == [0.125, 0.25]


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_a_learning_rate_that_is_none_is_refused(new_job, lr):
    with pytest.raises(ConfigError, match=r"the learning rate for step 0 is .*; it must be finite and not negative"):
        begin(new_job(), eg.SGD(lr=lr))
    with pytest.raises(ConfigError, match="the learning rate for step 0 is 'x'; it must be a number"):
        begin(new_job(), eg.SGD(lr=lambda step: "x"))


def test_a_function_that_goes_wrong_later_says_at_which_step(new_job):
    job = new_job()
    model, optimizer = begin(job, eg.SGD(lr=lambda step: 1.0 - step))
    with pytest.raises(ConfigError, match=r"the learning rate for step 2 is -1\.0"):
        steps(job, model, optimizer)


def test_a_learning_rate_may_be_a_tensor_or_a_numpy_number(new_job):
    job = new_job()
    model, optimizer = begin(job, eg.SGD(lr=torch.tensor(0.5)), eg.SGD(lr=np.float32(0.25)))
    steps(job, model, optimizer)
    assert values(job, model) == (-1.5, -0.75)


# -- step and zero_grad ------------------------------------------------------------------------------------------------


def test_step_takes_a_closure(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)
    losses = []
    for _ in job.epochs(1):
        for batch in job.batches(DATA, 4):

            def closure(batch=batch):
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(optimizer.step(closure).item())
    assert losses == [0, -2, -4]
    assert values(job, model) == (-3.0, -3.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_what_came_before(new_job, pservers, set_to_none):
    job = new_job(pservers)
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for batch in job.batches(DATA, 4):
            model(batch).backward()
            optimizer.zero_grad(set_to_none)
            model(batch).backward()
            optimizer.step()
    assert values(job, model) == (-3.0, -3.0)


def test_gradients_of_several_backwards_of_a_batch_add_up(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for batch in job.batches(DATA, 4):
            optimizer.zero_grad()
            model(batch).backward()
            (2 * model(batch)).backward()
            optimizer.step()
    assert values(job, model) == (-9.0, -9.0)


@pytest.mark.parametrize("zero_grad_after", [False, True])
def test_a_batch_never_sees_the_gradients_of_another(new_job, pservers, zero_grad_after):
    """Else the result would depend on which batches a trainer happened to get."""
    job = new_job(pservers)
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for batch in job.batches(DATA, 4):
            model(batch).backward()
            optimizer.step()
            if zero_grad_after:
                optimizer.zero_grad()
    assert values(job, model) == (-3.0, -3.0)


@pytest.mark.filterwarnings("ignore:optimizer.step")
def test_a_batch_that_is_skipped_after_backward_leaves_no_gradient_behind(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)
    for _ in job.epochs(1):
        for number, batch in enumerate(job.batches(DATA, 4)):
            model(batch).backward()
            if number == 1:
                continue
            optimizer.step()
            optimizer.zero_grad()
    assert values(job, model) == (-2.0, -2.0)


def test_step_outside_of_batches_is_refused(new_job):
    job = new_job()
    model, optimizer = begin(job)
    with pytest.raises(ConfigError, match=r"optimizer.step\(\) outside job.batches\(\); call it once for each batch"):
        optimizer.step()
    steps(job, model, optimizer)
    with pytest.raises(ConfigError, match=r"outside job.batches\(\)"):
        optimizer.step()
    assert values(job, model) == (-3.0, -3.0)


def test_a_second_step_for_a_batch_is_refused_and_the_first_counts(new_job, pservers):
    job = new_job(pservers)
    model, optimizer = begin(job)

    def again(_):
        with pytest.raises(ConfigError, match=r"called twice for one batch; to accumulate, raise batches_per_step"):
            optimizer.step()

    steps(job, model, optimizer, each=again)
    assert values(job, model) == (-3.0, -3.0)


def test_a_forgotten_step_is_told_once_and_trains_nothing(new_job, pservers):
    job = new_job(pservers)
    model, _ = begin(job)

    def body(epoch, number, batch):
        model(batch).backward()

    with pytest.warns(UserWarning, match=r"optimizer.step\(\) was not called for a batch") as told:
        loop(job, body, 2)
    assert len(told) == 1
    assert values(job, model) == (0.0, 0.0)


def test_a_batch_left_out_by_the_script_does_not_count_in_the_mean_of_its_step(new_job, pservers):
    job = new_job(pservers, eg.Sync(3))
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        optimizer.zero_grad()
        ((number + 1) * model(batch)).backward()
        if number != 1:
            optimizer.step()

    with pytest.warns(UserWarning, match="was not called for a batch"):
        loop(job, body)
    assert values(job, model) == (-2.0, -2.0)


def test_a_step_that_no_batch_contributes_to_changes_nothing(new_job, pservers):
    job = new_job(pservers, eg.Sync(3))
    model, optimizer = begin(job, eg.Adam(lr=0.1), eg.Adam(lr=0.1))

    def body(epoch, number, batch):
        optimizer.zero_grad()
        model(batch).backward()
        if epoch != 1:
            optimizer.step()

    with pytest.warns(UserWarning, match="was not called for a batch"):
        loop(job, body, 3)
    twice = new_job(pservers, eg.Sync(3))
    other, optimizer = begin(twice, eg.Adam(lr=0.1), eg.Adam(lr=0.1))
    steps(twice, other, optimizer, 2)
    assert values(job, model) == values(twice, other)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["w", "row"])
def test_a_batch_with_a_gradient_that_is_no_number_is_left_out_whole(new_job, pservers, where, value):
    job = new_job(pservers)
    model, optimizer = begin(job)

    def body(epoch, number, batch):
        optimizer.zero_grad()
        factors = {"w": 1.0, "row": 1.0, where: value if number == 1 else 1.0}
        (factors["w"] * model.w + factors["row"] * model.t(torch.tensor([0])).sum()).backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="a batch was left out: NaN or infinity in the gradient of") as told:
        loop(job, body)
    assert ("table 't'" if where == "row" else "gradient of 'w'") in str(told[0].message)
    assert values(job, model) == (-2.0, -2.0)


def test_a_buffer_that_turned_to_no_number_leaves_its_batch_out(new_job, pservers):
    job = new_job(pservers)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    optimizer = job.optimizer(model, dense=eg.SGD())

    def body(epoch, number, batch):
        optimizer.zero_grad()
        x = batch["x"] * (math.nan if number == 0 else 1.0)
        model(x)
        model[1](batch["x"]).sum().backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="NaN or infinity in buffer '0.running_mean'"):
        loop(job, body)
    job.evaluate(lambda batch: {}, DATA, 12)
    assert torch.isfinite(model[0].running_mean).all()
    assert model[0].num_batches_tracked == 2


def test_a_gradient_of_half_precision_that_overflows_is_left_out(new_job):
    job = new_job()
    model = nn.Linear(1, 1, dtype=torch.float16)
    optimizer = job.optimizer(model, dense=eg.SGD())
    before = model.weight.clone()

    def body(epoch, number, batch):
        (model(batch["x"].half()) * 60000).sum().backward()
        optimizer.step()

    with pytest.warns(UserWarning, match="a batch was left out"):
        loop(job, body, 1, 12)
    assert torch.equal(model.weight, before)
