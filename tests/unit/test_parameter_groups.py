"""Several rules in one model: by pattern of parameter names, by table, and a table's own."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.errors import ConfigError

IDS = np.arange(24)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.user = eg.Embedding("user", 4, **options.pop("user", {}))
        self.item = eg.Embedding("item", 4, **options.pop("item", {}))
        self.low, self.high = nn.Linear(8, 5), nn.Linear(5, 1)

    def forward(self, batch):
        x = torch.cat([self.user(batch["user"]), self.item(batch["item"])], dim=-1)
        return self.high(torch.tanh(self.low(x))).squeeze(-1)


def trained(job, model, steps=6, **rules):
    """The optimizer after some steps, and the learning rates that its groups had in each."""
    optimizer = job.optimizer(model, **rules)
    rates = []
    for _ in job.epochs(1):
        data = {"user": np.tile(IDS, steps), "item": np.tile(IDS % 7, steps)}
        for batch in job.batches(data, IDS.size, shuffle=False):
            optimizer.zero_grad()
            (model(batch) - 1).square().mean().backward()
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
    return optimizer, rates


def values(job, model, path):
    job.save_model(path)
    from safetensors.torch import load_file

    return load_file(path / "dense.safetensors")


def test_groups_of_one_rule_with_different_rates_are_torchs_parameter_groups(new_job, pservers, tmp_path):
    job = new_job(pservers)
    model = Model()
    plain = copy.deepcopy(nn.ModuleDict({"low": model.low, "high": model.high}))
    dense = {"low.*": eg.SGD(lr=0.3, momentum=0.9), "*.bias": eg.SGD(lr=0.02, momentum=0.9), "*": eg.SGD(lr=0.1)}
    _, rates = trained(job, model, dense=dense, sparse=eg.SGD(lr=0.0))
    assert rates == [[0.3, 0.02, 0.1, 0.0, 0.0]] * 6
    theirs = torch.optim.SGD(
        [
            {"params": plain["low"].parameters(), "lr": 0.3, "momentum": 0.9},
            {"params": [plain["high"].bias], "lr": 0.02, "momentum": 0.9},
            {"params": [plain["high"].weight], "lr": 0.1},
        ]
    )
    rows = rows_of_zero_rate(model, job)
    for _ in range(6):
        theirs.zero_grad()
        (plain["high"](torch.tanh(plain["low"](rows))).squeeze(-1) - 1).square().mean().backward()
        theirs.step()
    ours = values(job, model, tmp_path / "model")
    for name, parameter in plain.named_parameters():
        assert torch.equal(ours[name], parameter), name


def rows_of_zero_rate(model, job):
    """What both tables read for all samples: their initial values, since nothing moved them."""
    from evergrad.kernels.initial import initial_rows, table_seed

    user = initial_rows(IDS, 4, model.user.init, table_seed(0, "user"))
    item = initial_rows(IDS % 7, 4, model.item.init, table_seed(0, "item"))
    return torch.from_numpy(np.concatenate([user, item], axis=1))


def test_each_group_follows_its_own_function_of_the_step(new_job):
    dense = {"low.*": eg.Adam(lr=lambda step: 0.1 / (1 + step)), "*": eg.Adam(lr=lambda step: float(step))}
    _, rates = trained(
        new_job(), Model(), 3, dense=dense, sparse={"user": eg.SGD(lr=lambda step: 2.0 * step), "*": eg.SGD(lr=0.5)}
    )
    assert rates == [[0.1, 0.0, 0.0, 0.5], [0.05, 1.0, 2.0, 0.5], [0.1 / 3, 2.0, 4.0, 0.5]]


def test_a_rate_set_in_a_parameter_group_is_what_its_parameters_get(new_job, tmp_path):
    job, model = new_job(), Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = job.optimizer(model, dense={"low.*": eg.SGD(lr=0.5), "*": eg.SGD(lr=0.5)}, sparse=eg.SGD(lr=0.5))
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in job.epochs(1):
        for batch in job.batches({"user": IDS, "item": IDS}, IDS.size):
            model(batch).sum().backward()
            optimizer.step()
    after = values(job, model, tmp_path / "model")
    assert torch.equal(after["low.weight"], before["low.weight"])
    assert not torch.equal(after["high.weight"], before["high.weight"])


def rows(path, table):
    from evergrad.checkpoint.model import Model as Saved

    keys, found = Saved(path).table(table)
    return found[np.argsort(keys)]


def test_a_tables_own_rule_goes_before_sparse(new_job, tmp_path):
    saved = {}
    for name, options, sparse in (
        ("by name", {}, {"user": eg.Adagrad(lr=0.3), "*": eg.FTRL(lr=0.2)}),
        ("own", {"user": {"optimizer": eg.Adagrad(lr=0.3)}}, eg.FTRL(lr=0.2)),
        ("all own", {"user": {"optimizer": eg.Adagrad(lr=0.3)}, "item": {"optimizer": eg.FTRL(lr=0.2)}}, None),
        ("over a name", {"user": {"optimizer": eg.Adagrad(lr=0.3)}}, {"user": eg.SGD(), "item": eg.FTRL(lr=0.2)}),
    ):
        job, model = new_job(), Model(**options)
        optimizer, _ = trained(job, model, dense=eg.SGD(lr=0.1), sparse=sparse)
        assert [(g.get("table"), g["lr"]) for g in optimizer.param_groups[1:]] == [("user", 0.3), ("item", 0.2)]
        job.save_model(tmp_path / name)
        saved[name] = [rows(tmp_path / name, table).tobytes() for table in ("user", "item")]
    assert len({tuple(found) for found in saved.values()}) == 1


def test_a_bag_has_an_optimizer_too_and_two_modules_may_share_it(new_job):
    class Shared(nn.Module):
        def __init__(self, *rules):
            super().__init__()
            self.one = eg.Embedding("t", 2, optimizer=rules[0])
            self.other = eg.EmbeddingBag("t", 2, optimizer=rules[1])

    ours = eg.RowWiseAdagrad(lr=0.3)
    for rules in ((ours, None), (None, ours), (ours, eg.RowWiseAdagrad(lr=0.3))):
        optimizer = new_job().optimizer(Shared(*rules))
        assert optimizer.param_groups[0]["lr"] == 0.3
    with pytest.raises(ConfigError, match="share table 't' but not its optimizer"):
        new_job().optimizer(Shared(ours, eg.RowWiseAdagrad(lr=0.4)))


@pytest.mark.parametrize(
    ("options", "rules", "says"),
    [
        ({}, {"dense": eg.SGD()}, "table 'user' has no rule; give job.optimizer a sparse= rule"),
        ({"user": {"optimizer": eg.SGD()}}, {"dense": eg.SGD()}, "table 'item' has no rule"),
        ({}, {"dense": eg.SGD(), "sparse": {"user": eg.SGD()}}, "table 'item' fits no name or pattern"),
        ({}, {"dense": eg.SGD(), "sparse": {"*": eg.SGD(), "bag": eg.SGD()}}, "sparse= has a rule for 'bag'"),
        ({}, {"dense": {"low.*": eg.SGD()}, "sparse": eg.SGD()}, "'high.weight' fits none of the patterns"),
        ({}, {"dense": {"*": eg.SGD(), "low.*": eg.SGD()}, "sparse": eg.SGD()}, "no parameter is left for"),
        ({}, {"dense": eg.RowWiseAdagrad(), "sparse": eg.SGD()}, "use eg.Adagrad for parameters"),
        ({}, {"dense": torch.optim.Adam, "sparse": eg.SGD()}, "dense= is no rule but Adam; give eg.SGD, .* or eg.FTRL"),
        ({}, {"dense": eg.SGD(), "sparse": {"*": 0.1}}, "sparse= is no rule but float"),
    ],
)
def test_what_has_no_rule_or_a_wrong_one_is_named(new_job, options, rules, says):
    with pytest.raises(ConfigError, match=says):
        new_job().optimizer(Model(**options), **rules)


def test_what_is_no_rule_is_refused_where_the_table_is_made():
    with pytest.raises(ConfigError, match="optimizer= of table 't' is no rule but str"):
        eg.Embedding("t", 2, optimizer="adam")


@pytest.mark.parametrize(
    "init",
    [
        eg.init_rows.truncated_normal(0.1, 0.5, -0.2, 1.0),
        eg.init_rows.xavier_uniform(),
        eg.init_rows.xavier_normal(2.0),
    ],
    ids=repr,
)
def test_a_saved_model_answers_unseen_ids_with_the_first_values_of_training(new_job, tmp_path, init):
    from evergrad.kernels.initial import initial_rows, table_seed

    options = {"init": init, "unseen": "initializer"}
    job, model = new_job(), Model(user=options)
    trained(job, model, 1, dense=eg.SGD(), sparse=eg.SGD())
    job.save_model(tmp_path / "model")
    loaded = eg.load_model(Model(user=options), tmp_path / "model")
    ids = np.array([1_000_000, -5])
    assert (loaded.user(torch.from_numpy(ids)).numpy() == initial_rows(ids, 4, init, table_seed(0, "user"))).all()
