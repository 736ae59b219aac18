"""A saved model, loaded for inference without a job."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.errors import CheckpointError, ConfigError
from evergrad.kernels.initial import initial_rows, table_seed

KEYS = np.array([-(2**63), -5, -1, 0, 1, 7, 2**40, 2**63 - 1])
DATA = {
    "user": np.tile(KEYS, 4),
    "genres": eg.data.Ragged.from_lists([[i % 3, 5][: i % 3] for i in range(32)]),
    "x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(32, 2),
}


class Net(nn.Module):
    def __init__(self, dim=3, hidden=4, unseen="zeros", user="user"):
        super().__init__()
        self.user = eg.Embedding(user, dim, unseen=unseen)
        self.padded = eg.Embedding(user, dim, unseen=unseen, padding_idx=0)
        self.genres = eg.EmbeddingBag("genres", 2)
        self.net = nn.Sequential(
            nn.Linear(2 * dim + 4, hidden), nn.BatchNorm1d(hidden), nn.Dropout(), nn.Linear(hidden, 1)
        )

    def forward(self, batch):
        parts = [self.user(batch["user"]), self.padded(batch["user"]), self.genres(*batch["genres"]), batch["x"]]
        return self.net(torch.cat(parts, dim=-1)).squeeze(-1)


def save(job, path, **options):
    """Train a little, save; returns the predictions of the last evaluation."""
    model = Net(**options)
    optimizer = job.optimizer(model, dense=eg.Adam(lr=0.01), sparse=eg.Adagrad(lr=0.1))
    for _ in job.epochs(2):
        for batch in job.batches(DATA, 5):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    predictions = []
    job.evaluate(lambda batch: predictions.append(model(batch)) or {}, DATA, 32)
    job.save_model(path)
    return predictions[0]


def batch():
    return eg.data.Columns(DATA).fetch(np.arange(32))


def test_a_loaded_model_predicts_to_the_bit_what_the_last_evaluation_did(new_job, pservers, tmp_path):
    wanted = save(new_job(pservers), tmp_path / "model")
    model = eg.load_model(Net(), tmp_path / "model")
    assert not any(m.training for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(batch()), wanted)


def test_the_model_given_is_filled_and_returned(new_job, tmp_path):
    save(new_job(), tmp_path / "model")
    model = Net()
    assert eg.load_model(model, os.fspath(tmp_path / "model")) is model


def test_the_model_that_was_trained_can_be_loaded_into_and_go_on_in_the_job(new_job, tmp_path):
    job, path = new_job(), tmp_path / "model"
    wanted = save(job, path)
    eg.load_model(job._bound.model, path)
    assert torch.equal(job._bound.model(batch()).detach(), wanted)
    assert job.evaluate(lambda b: {"n": len(b["x"])}, DATA, 32) == {"n": 32}


def test_keys_without_a_row_read_zeros(new_job, tmp_path):
    save(new_job(), tmp_path / "model")
    model = eg.load_model(Net(), tmp_path / "model")
    rows = model.user(torch.tensor([[8, -(2**62)], [7, 8]]))
    assert torch.equal(rows[0], torch.zeros(2, 3))
    assert rows[1, 0].abs().sum() > 0
    assert torch.equal(rows[1, 1], torch.zeros(3))


def test_keys_without_a_row_read_their_initial_values_if_the_table_says_so(new_job, pservers, tmp_path):
    save(new_job(pservers, seed=9), tmp_path / "model", unseen="initializer")
    model = eg.load_model(Net(unseen="initializer"), tmp_path / "model")
    keys = np.array([8, 2**62])
    wanted = initial_rows(keys, 3, eg.init_rows.normal(), table_seed(9, "user"))
    assert np.array_equal(model.user(torch.from_numpy(keys)).numpy(), wanted)


def test_evaluation_in_the_job_and_the_loaded_model_agree_on_keys_without_a_row(new_job, pservers, tmp_path):
    for unseen in ("zeros", "initializer"):
        job = new_job(pservers)
        save(job, tmp_path / unseen, unseen=unseen)
        model, rows = job._bound.model, []
        job.evaluate(lambda b, m=model, r=rows: r.append(m.user(b["user"])) or {}, {"user": np.arange(100, 120)}, 20)
        loaded = eg.load_model(Net(unseen=unseen), tmp_path / unseen)
        assert torch.equal(loaded.user(torch.arange(100, 120)), rows[0])


def test_padding_reads_zeros_also_where_the_table_has_a_row_of_that_key(new_job, tmp_path):
    save(new_job(), tmp_path / "model")
    model = eg.load_model(Net(), tmp_path / "model")
    assert model.user(torch.tensor([0])).abs().sum() > 0
    assert torch.equal(model.padded(torch.tensor([0])), torch.zeros(1, 3))


def test_a_table_without_rows_can_be_read(new_job, tmp_path):
    job = new_job()
    job.optimizer(nn.ModuleList([eg.Embedding("t", 2)]), sparse=eg.SGD())
    job.save_model(tmp_path / "model")
    (module,) = eg.load_model(nn.ModuleList([eg.Embedding("t", 2)]), tmp_path / "model")
    assert torch.equal(module(torch.tensor([1, 2])), torch.zeros(2, 2))
    assert module(torch.zeros(0, dtype=torch.int64)).shape == (0, 2)


def test_a_model_without_tables_can_be_saved_and_loaded(new_job, tmp_path):
    job, model = new_job(), nn.Linear(2, 1)
    job.optimizer(model, dense=eg.SGD())
    job.save_model(tmp_path / "model")
    loaded = eg.load_model(nn.Linear(2, 1), tmp_path / "model")
    assert torch.equal(loaded.weight, model.weight)


def test_tied_weights_frozen_parameters_and_buffers_come_back(new_job, tmp_path):
    def net():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
        model[1].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        model.register_buffer("mask", torch.tensor([0, -torch.inf]))
        model.register_buffer("passing", torch.rand(2), persistent=False)
        return model

    job, model = new_job(), net()
    job.optimizer(model, dense=eg.SGD())
    job.save_model(tmp_path / "model")
    loaded = eg.load_model(net(), tmp_path / "model")
    assert loaded[0].weight is loaded[1].weight
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_loaded_rows_are_for_reading_and_what_is_done_with_them_leaves_them_as_they_are(new_job, tmp_path):
    save(new_job(), tmp_path / "model")
    model = eg.load_model(Net(), tmp_path / "model")
    ids = torch.tensor([1, 7])
    before = model.user(ids).clone()
    model.user(ids).mul_(5)
    assert not model.user(ids).requires_grad
    assert torch.equal(model.user(ids), before)


def test_a_model_can_be_loaded_twice(new_job, tmp_path):
    first = save(new_job(seed=1), tmp_path / "1")
    second = save(new_job(seed=2), tmp_path / "2")
    model = Net()
    for path, wanted in (("1", first), ("2", second)):
        assert torch.equal(eg.load_model(model, tmp_path / path)(batch()).detach(), wanted)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dim": 4}, "table 'user' has dim 3 in .* and 4 in this model"),
        ({"user": "person"}, "is of another model: it has table 'user' more"),
        ({"hidden": 5}, r"'net.0.weight' is \[4, 10\] in .*, \[5, 10\] in this model"),
    ],
)
def test_a_model_of_another_class_is_refused_with_what_differs_and_left_as_it_was(new_job, tmp_path, options, sentence):
    save(new_job(), tmp_path / "model")
    model = Net(**options)
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(CheckpointError, match=sentence):
        eg.load_model(model, tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert model.training


def test_parameters_and_tables_more_or_fewer_are_named(new_job, tmp_path):
    save(new_job(), tmp_path / "model")
    model = Net()
    model.more = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=r"is of another model: it lacks more.bias, more.weight"):
        eg.load_model(model, tmp_path / "model")
    model = Net()
    del model.net[3]
    with pytest.raises(CheckpointError, match=r"is of another model: it has net.3.bias, net.3.weight more"):
        eg.load_model(model, tmp_path / "model")
    model = Net()
    model.more = eg.Embedding("more", 1)
    with pytest.raises(CheckpointError, match="it has no table 'more', only 'user', 'genres'"):
        eg.load_model(model, tmp_path / "model")


def test_a_model_without_memory_is_refused(new_job, tmp_path):
    save(new_job(), tmp_path / "model")
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ConfigError, match=r"call model.to_empty\(device='cpu'\) on the model first"):
        eg.load_model(model, tmp_path / "model")
    assert torch.isfinite(eg.load_model(model.to_empty(device="cpu"), tmp_path / "model")(batch())).all()


def test_a_dense_file_that_changed_is_refused(new_job, tmp_path):
    save(new_job(), tmp_path / "model")
    path = tmp_path / "model" / "dense.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"dense.safetensors has changed since it was written"):
        eg.load_model(Net(), tmp_path / "model")


def test_a_model_is_loaded_in_another_process_without_a_job(new_job, tmp_path):
    job, model = new_job(), nn.ModuleList([eg.Embedding("t", 1, unseen="initializer")])
    job.optimizer(model, sparse=eg.SGD())
    job.save_model(tmp_path / "model")
    code = (
        "import sys, torch, evergrad as eg\n"
        "m = torch.nn.ModuleList([eg.Embedding('t', 1, unseen='initializer')])\n"
        "print(eg.load_model(m, sys.argv[1])[0](torch.tensor([3])).item())"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = initial_rows(np.array([3]), 1, eg.init_rows.normal(), table_seed(0, "t"))
    assert float(done.stdout) == wanted.item()
