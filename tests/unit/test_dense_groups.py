"""Parameters and buffers of torch models as the groups that pservers hold, and models of every kind in a job."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.errors import ConfigError
from evergrad.job.dense import NotFinite, groups_of
from evergrad.messages import GroupKind

SAMPLES = {"x": torch.linspace(-1, 1, 24).reshape(8, 3), "y": torch.arange(8.0)}


def names(groups, kind):
    return [[p.name for p in g.spec.parameters] for g in groups if g.kind is kind]


def train(job, model, epochs=1, data=SAMPLES, batch_size=4, **rules):
    """Epochs of squared error; returns the losses."""
    optimizer = job.optimizer(model, **(rules or {"dense": eg.SGD(lr=0.1)}))
    losses = []
    for _ in job.epochs(epochs):
        for batch in job.batches(data, batch_size, shuffle=False):
            optimizer.zero_grad()
            loss = (model(batch["x"]).float().squeeze(-1) - batch["y"]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    refresh(job, model)
    return losses


def refresh(job, model):
    """Have the newest values in the model."""
    job.evaluate(lambda batch: {}, {"x": torch.zeros(1)}, 1)


def plain(model, epochs=1, lr=0.1):
    """The same in plain torch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for _ in range(epochs):
        for start in (0, 4):
            batch = {name: column[start : start + 4] for name, column in SAMPLES.items()}
            optimizer.zero_grad()
            loss = (model(batch["x"]).float().squeeze(-1) - batch["y"]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


# -- groups ------------------------------------------------------------------------------------------------------------


def test_one_rule_makes_one_group_in_the_order_of_the_model():
    groups = groups_of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), eg.SGD())
    assert names(groups, GroupKind.TRAINED) == [["0.weight", "0.bias", "1.weight", "1.bias"]]
    assert [g.kind for g in groups] == [GroupKind.TRAINED]


def test_patterns_choose_rules_and_the_first_that_fits_counts():
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    rules = {"head.*": eg.Adam(), "*.bias": eg.SGD(lr=0.5), "*": eg.Adagrad()}
    groups = groups_of(model, rules)
    assert names(groups, GroupKind.TRAINED) == [["head.weight", "head.bias"], ["body.bias"], ["body.weight"]]
    assert [g.rule for g in groups] == list(rules.values())


def test_a_name_of_a_parameter_is_a_pattern_also_with_brackets_in_it():
    model = nn.Module()
    model.register_parameter("w[0]", nn.Parameter(torch.zeros(1)))
    assert names(groups_of(model, {"w[0]": eg.SGD()}), GroupKind.TRAINED) == [["w[0]"]]


def test_a_parameter_that_no_pattern_fits_is_named():
    with pytest.raises(ConfigError, match=r"parameter 'bias' fits none of the patterns of dense=.*'\*' at the end"):
        groups_of(nn.Linear(2, 1), {"weight": eg.SGD()})


def test_a_pattern_that_fits_nothing_is_named():
    with pytest.raises(ConfigError, match="dense= has a rule for 'head', which no parameter is left for"):
        groups_of(nn.Linear(2, 1), {"*": eg.SGD(), "head": eg.Adam()})


def test_parameters_without_any_rule_say_what_to_give():
    with pytest.raises(ConfigError, match=r"parameter 'weight' has no rule; give job.optimizer a dense= rule"):
        groups_of(nn.Linear(2, 1), None)


def test_tied_weights_are_one_parameter():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert names(groups_of(model, eg.SGD()), GroupKind.TRAINED) == [["0.weight"]]


def test_frozen_parameters_and_kinds_of_buffers_have_groups_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    model.register_buffer("flag", torch.tensor(True))
    groups = groups_of(model, eg.SGD())
    assert names(groups, GroupKind.FROZEN) == [["0.bias"]]
    assert names(groups, GroupKind.AVERAGED) == [["1.running_mean", "1.running_var"]]
    assert sorted(names(groups, GroupKind.LOWEST)[0]) == ["1.num_batches_tracked", "flag"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_parameters_that_float32_cannot_hold_are_refused(dtype):
    model = nn.Linear(2, 1, dtype=dtype)
    with pytest.raises(ConfigError, match=rf"parameter 'weight' is {dtype}; .* call .float\(\) on it first"):
        groups_of(model, eg.SGD())


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_buffers_that_float32_cannot_hold_are_refused(dtype):
    model = nn.Linear(2, 1)
    model.register_buffer("freqs", torch.zeros(2, dtype=dtype))
    with pytest.raises(ConfigError, match=f"buffer 'freqs' is {dtype}"):
        groups_of(model, eg.SGD())


def test_a_model_without_values_is_refused():
    with pytest.raises(ConfigError, match="parameter 'weight' has no values yet; initialize the model"):
        groups_of(nn.Linear(2, 1, device="meta"), eg.SGD())
    with pytest.raises(ConfigError, match="parameter 'weight' has no values yet"):
        groups_of(nn.LazyLinear(1), eg.SGD())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_parameter_that_starts_as_no_number_is_refused(value):
    model = nn.Linear(2, 1)
    nn.init.constant_(model.bias, value)
    with pytest.raises(ConfigError, match="parameter 'bias' has NaN or infinity among its initial values"):
        groups_of(model, eg.SGD())


def test_values_go_out_and_come_back_in_the_models_types():
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.bfloat16), nn.Linear(2, 1), nn.Linear(1, 1, dtype=torch.float16))
    (group,) = groups_of(model, eg.SGD())
    values = group.values()
    assert values.dtype == np.float32
    assert values.size == sum(p.numel() for p in model.parameters())
    group.load(values + np.float32(1))
    assert (group.values() != values).all()
    group.load(values)
    assert (group.values() == values).all()
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.float16] * 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integer_buffers_keep_all_their_bits(dtype):
    model = nn.Linear(1, 1)
    largest = True if dtype is torch.bool else torch.iinfo(dtype).max
    model.register_buffer("n", torch.tensor([0, largest, largest], dtype=dtype))
    group = groups_of(model, eg.SGD())[1]
    wanted = model.n.clone()
    values = group.values()
    model.n.zero_()
    group.load(values)
    assert torch.equal(model.n, wanted)


def test_values_that_may_not_be_written_to_can_be_loaded():
    (group,) = groups_of(nn.Linear(2, 1), eg.SGD())
    values = np.arange(3, dtype=np.float32)
    values.flags.writeable = False
    group.load(values)
    assert group.values().tolist() == [0, 1, 2]


def test_gradients_tell_who_has_none():
    model = nn.Linear(2, 1)
    (group,) = groups_of(model, eg.SGD())
    model.bias.grad = torch.tensor([5.0])
    values, present = group.gradients()
    assert (values.tolist(), present.tolist()) == ([0, 0, 5], [0, 1])


def test_a_gradient_that_is_no_number_names_its_parameter():
    model = nn.Linear(2, 1)
    (group,) = groups_of(model, eg.SGD())
    model.weight.grad = torch.tensor([[1.0, math.nan]])
    with pytest.raises(NotFinite, match="weight"):
        group.gradients()


# -- in a job ----------------------------------------------------------------------------------------------------------


def test_a_plain_model_without_tables_trains_as_in_torch(new_job, pservers):
    torch.manual_seed(3)
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    other.load_state_dict(model.state_dict())
    assert train(new_job(pservers), model, 3) == pytest.approx(plain(other, 3), rel=1e-6)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_tied_weights_stay_tied_and_get_the_sum_of_their_gradients(new_job, pservers):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 1))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    other.load_state_dict(model.state_dict())
    assert train(new_job(pservers), model, 2) == pytest.approx(plain(other, 2), rel=1e-5)
    assert model[0].weight is model[1].weight


def test_frozen_parameters_stay_as_they_are(new_job, pservers):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    train(new_job(pservers), model)
    assert [torch.equal(p, before[name]) for name, p in model.named_parameters()] == [True, True, False, False]


def test_float_buffers_are_averaged_over_the_samples_of_a_step(new_job, pservers):
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 1))
    job = new_job(pservers, eg.Sync(2))
    data = {name: column[:7] for name, column in SAMPLES.items()}
    train(job, model, data=data)
    means = [data["x"][a:b].mean(0) * (b - a) for a, b in ((0, 3), (3, 7))]
    torch.testing.assert_close(model[0].running_mean, sum(means) / 7)
    assert model[0].num_batches_tracked == 1


def test_integer_buffers_are_those_of_the_lowest_task(new_job, pservers):
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.register_buffer("seen", torch.tensor(0))

        def forward(self, x):
            self.seen += len(x)
            return super().forward(x)

    model = Counts()
    data = {name: column[:7] for name, column in SAMPLES.items()}
    train(new_job(pservers, eg.Sync(2)), model, data=data)
    assert model.seen == 3


def test_buffers_that_are_not_persistent_are_left_alone(new_job):
    model = nn.Linear(3, 1)
    model.register_buffer("mine", torch.tensor([1.0]), persistent=False)
    job = new_job()
    optimizer = job.optimizer(model, dense=eg.SGD())
    for _ in job.epochs(1):
        for batch in job.batches(SAMPLES, 4):
            model.mine += 1
            optimizer.zero_grad()
            model(batch["x"]).sum().backward()
            optimizer.step()
    assert model.mine == 3


def test_infinity_in_a_buffer_that_nobody_changes_is_no_reason_to_stop(new_job, pservers):
    """A mask of an attention is one."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)
            self.register_buffer("mask", torch.tensor([0.0, -math.inf, math.nan]))

        def forward(self, x):
            return self.head(self.norm(x))

    model = Masked()
    before = model.head.weight.clone()
    train(new_job(pservers), model)
    assert not torch.equal(model.head.weight, before)
    assert model.norm.num_batches_tracked == 2
    assert model.mask.tolist()[:2] == [0, -math.inf]
    assert math.isnan(model.mask[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_half_precision_train_and_keep_their_type(new_job, pservers, dtype):
    """The pservers keep float32, so that steps too small for the type add up."""
    model = nn.Linear(3, 1, dtype=dtype)
    nn.init.ones_(model.weight)
    job = new_job(pservers)
    optimizer = job.optimizer(model, dense=eg.SGD(lr=1e-3))
    for _ in job.epochs(5):
        for _ in job.batches(SAMPLES, 4):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
    refresh(job, model)
    assert model.weight.dtype == dtype
    assert torch.equal(model.weight, torch.full((1, 3), 0.99).to(dtype))


def test_parameters_without_a_gradient_are_left_alone_with_their_state(new_job, pservers):
    """As in torch: Adam moves a parameter whose gradient is zero, but not one whose gradient is None."""
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    other = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    other.load_state_dict(model.state_dict())
    job = new_job(pservers)
    optimizer, plain_optimizer = job.optimizer(model, dense=eg.Adam(lr=0.1)), torch.optim.Adam(other.parameters(), 0.1)
    for epoch in job.epochs(6):
        part = "a" if epoch % 3 else "b"
        for batch in job.batches(SAMPLES, 8):
            for m, o in ((model, optimizer), (other, plain_optimizer)):
                o.zero_grad()
                m[part](batch["x"]).square().sum().backward()
                o.step()
    refresh(job, model)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_sparse_gradients_of_a_plain_embedding_work(new_job, pservers):
    def embedding():
        torch.manual_seed(1)
        return nn.EmbeddingBag(20, 1, mode="sum", sparse=True)

    model, other = embedding(), embedding()
    data = {"x": torch.arange(24).reshape(8, 3) % 20, "y": SAMPLES["y"]}
    train(new_job(pservers), model, data=data)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for start in (0, 4):
        optimizer.zero_grad()
        (other(data["x"][start : start + 4]).squeeze(-1) - data["y"][start : start + 4]).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict())


def test_a_model_of_nothing_but_tables_trains_and_needs_no_dense_rule(new_job, pservers):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.t = eg.Embedding("x", 1, init=eg.init_rows.zeros())

        def forward(self, ids):
            return self.t(ids)

    data = {"x": torch.arange(8), "y": SAMPLES["y"]}
    losses = train(new_job(pservers), Tables(), 30, data, 8, sparse=eg.SGD(lr=2.0))
    assert losses[0] == pytest.approx(17.5)
    assert losses[-1] < 1e-3


def test_rules_nobody_needs_do_no_harm(new_job):
    new_job().optimizer(nn.Linear(1, 1), dense=eg.SGD(), sparse=eg.SGD())
    new_job().optimizer(eg.Embedding("t", 1), dense=eg.SGD(), sparse=eg.SGD())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_with_nothing_to_train_is_refused(new_job, frozen):
    model = nn.Linear(1, 1).requires_grad_(False) if frozen else nn.ReLU()
    with pytest.raises(ConfigError, match="the model has nothing to train: no table, and no parameter"):
        new_job().optimizer(model, dense=eg.SGD(), sparse=eg.SGD())


def test_parameters_of_no_elements_and_of_no_dimension_are_legal(new_job, pservers):
    model = nn.Linear(3, 1)
    model.empty, model.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.0))
    train(new_job(pservers), model)
    assert model.empty.shape == (0, 4)
    assert model.scale == 1


# -- tables ------------------------------------------------------------------------------------------------------------


def two_tables():
    return nn.ModuleList([eg.Embedding("user", 2), eg.Embedding("item[0]", 2)])


def test_sparse_rules_go_by_name_or_pattern_of_the_table(new_job):
    rules = {"item[0]": eg.SGD(lr=0.5), "us*": eg.Adam(lr=0.25)}
    optimizer = new_job().optimizer(two_tables(), sparse=rules)
    assert [(g["table"], g["lr"]) for g in optimizer.param_groups] == [("user", 0.25), ("item[0]", 0.5)]


def test_a_table_without_a_rule_is_named(new_job):
    with pytest.raises(ConfigError, match=r"table 'user' has no rule; give job.optimizer a sparse= rule"):
        new_job().optimizer(two_tables(), dense=eg.SGD())
    with pytest.raises(ConfigError, match="table 'user' fits no name or pattern of sparse="):
        new_job().optimizer(two_tables(), sparse={"item*": eg.SGD()})


def test_a_rule_for_a_table_that_is_not_there_is_named(new_job):
    with pytest.raises(ConfigError, match=r"sparse= has a rule for 'itm'; the model's tables are user, item\[0\]"):
        new_job().optimizer(two_tables(), sparse={"*": eg.SGD(), "itm": eg.SGD()})


@pytest.mark.parametrize(
    "other",
    [
        lambda: eg.Embedding("t", 3),
        lambda: eg.Embedding("t", 2, init=eg.init_rows.zeros()),
        lambda: eg.EmbeddingBag("t", 2, unseen="initializer"),
    ],
)
def test_modules_that_share_a_table_must_agree_on_it(new_job, other):
    with pytest.raises(ConfigError, match="two modules share table 't' but not its dim, init, unseen and policy"):
        new_job().optimizer(nn.ModuleList([eg.Embedding("t", 2), other()]), sparse=eg.SGD())


# -- what a user of torch may try first --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [torch.optim.Adam, "adam", 0.1, {"*": torch.optim.SGD}, {"*": None}, eg.Adam])
def test_what_is_no_rule_is_refused_with_those_there_are(new_job, rule):
    with pytest.raises(ConfigError, match=r"dense= is no rule but \w+; give eg.SGD, eg.Adagrad, .* or eg.FTRL"):
        new_job().optimizer(nn.Linear(1, 1), dense=rule)
    with pytest.raises(ConfigError, match="sparse= is no rule"):
        new_job().optimizer(eg.Embedding("t", 1), sparse=rule)


def test_the_optimizer_wants_the_model_and_not_its_parameters(new_job):
    with pytest.raises(ConfigError, match="wants the model itself, a torch module, not a generator"):
        new_job().optimizer(nn.Linear(1, 1).parameters(), dense=eg.SGD())


def test_a_job_has_one_model(new_job):
    job = new_job()
    job.optimizer(nn.Linear(1, 1), dense=eg.SGD())
    with pytest.raises(ConfigError, match=r"job.optimizer\(\) was called twice"):
        job.optimizer(nn.Linear(1, 1), dense=eg.SGD())


def test_a_refused_model_can_be_corrected_in_the_same_job(new_job):
    job = new_job()
    with pytest.raises(ConfigError, match="has no rule"):
        job.optimizer(nn.Linear(3, 1))
    train(job, nn.Linear(3, 1))
