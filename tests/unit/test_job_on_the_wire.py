"""What travels between a trainer and the pservers: types of numbers, parts of messages, and when."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.checkpoint.model import Model as SavedModel
from evergrad.errors import ConfigError
from evergrad.job.embedded import embedded_session
from evergrad.job.job import Job
from evergrad.messages import Member, Schema, Wire
from evergrad.pserver.pserver import Pserver

LARGE = 1 << 30
Update = eg.Sync | eg.Async | eg.LocalSGD


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = eg.Embedding("user", 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.norm(self.user(batch["user"]))).squeeze(-1)


def trained(
    folder: Path,
    update: Update,
    wire: str = "float32",
    pservers: int = 1,
    message_bytes: int = LARGE,
    piece_bytes: int = LARGE,
) -> tuple[str, list[float]]:
    """A digest of the model that two epochs give, and the losses on the way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_ahead = isinstance(update, eg.Async) and update.ahead
    schema = Schema(0, update.spec(), (), (), Wire(wire))
    local = update if isinstance(update, eg.LocalSGD) else None
    job = Job(embedded_session(pservers, message_bytes, piece_bytes), schema, True, is_ahead, local)
    model = Model()
    optimizer = job.optimizer(model, dense=eg.Adam(lr=0.01), sparse=eg.Adagrad(lr=0.1))
    rng = np.random.default_rng(0)
    data = {"user": rng.integers(-(2**62), 2**62, 600), "y": rng.random(600, dtype=np.float32)}
    losses = []
    for _ in job.epochs(2):
        for batch in job.batches(data, 64):
            optimizer.zero_grad()
            loss = ((model(batch) - batch["y"]) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    job.save_model(folder / "model")
    files = sorted(p for p in (folder / "model").rglob("*") if p.is_file())
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest(), losses


UPDATES = [
    eg.Sync(2),
    eg.Async(batches_per_task=3),
    eg.Async(batches_per_task=3, ahead=False),
    eg.LocalSGD(3, 2, outer=eg.SGD(lr=0.7, momentum=0.9, nesterov=True)),
]
NAMES = ["sync", "async", "async-not-ahead", "local-sgd"]


@pytest.mark.parametrize("update", UPDATES, ids=NAMES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_the_model_is_the_same_however_messages_are_cut_and_for_any_number_of_pservers(
    tmp_path: Path, update: Update, wire: str
) -> None:
    whole, _ = trained(tmp_path, update, wire)
    assert trained(tmp_path, update, wire, pservers=3)[0] == whole
    assert trained(tmp_path, update, wire, pservers=2, piece_bytes=100)[0] == whole
    if isinstance(update, eg.Async) and update.ahead:
        return  # the later parts of what is pulled ahead may be read before or after the push under way is applied
    assert trained(tmp_path, update, wire, message_bytes=300)[0] == whole
    assert trained(tmp_path, update, wire, pservers=3, message_bytes=100)[0] == whole


def test_pulling_ahead_goes_on_from_task_to_task(tmp_path: Path) -> None:
    short, long = (trained(tmp_path, eg.Async(batches_per_task=count))[0] for count in (3, 10))
    assert short == long, "an epoch of ten batches is the same in four tasks as in one"


@pytest.mark.parametrize(("wire", "bound"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_a_shorter_type_on_the_wire_changes_losses_by_its_rounding_only(
    tmp_path: Path, wire: str, bound: float
) -> None:
    exact, short = (trained(tmp_path, eg.Sync(2), w)[1] for w in ("float32", wire))
    assert exact != short
    np.testing.assert_allclose(short, exact, atol=bound)


def test_pulling_ahead_reads_values_without_the_update_just_before(tmp_path: Path) -> None:
    ahead, waiting = (trained(tmp_path, u)[1] for u in UPDATES[1:3])
    assert ahead[0] == waiting[0]
    assert ahead[1] != waiting[1], "the second batch of a task was read before the first was applied"


def test_a_type_the_wire_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="wire is 'int8'; give one of float32, bfloat16, float16"):
        eg.init(wire="int8")


def test_a_push_beyond_the_memory_of_a_pserver_ends_the_loop_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evergrad.job.embedded.Pserver", lambda member: Pserver(Member(member), room=lambda: 5000.0))
    with pytest.raises(ConfigError, match=r"0 rows.* and 5,000 are left; start the job with more --pservers"):
        trained(tmp_path, eg.Sync(2))


@pytest.mark.parametrize("pservers", [1, 2, 3])
@pytest.mark.parametrize("update", UPDATES, ids=NAMES)
def test_rows_evicted_on_demand_are_gone_with_the_batchs_update(tmp_path: Path, pservers: int, update: Update) -> None:
    local = update if isinstance(update, eg.LocalSGD) else None
    job = Job(embedded_session(pservers, 200), Schema(0, update.spec(), (), ()), True, local=local)
    model = eg.Embedding("t", 2)
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=0.1))
    for epoch in job.epochs(2):
        for batch in job.batches({"t": np.arange(100), "n": np.arange(100)}, 50, shuffle=False):
            optimizer.zero_grad()
            if epoch == 1 and batch["n"][0] == 0:
                job.evict("t", torch.arange(10, 60, dtype=torch.int32).reshape(5, 10))
            model(batch["t"][batch["t"] < 100 * (1 - epoch) + 5]).sum().backward()
            optimizer.step()
    job.save_model(tmp_path / "model")
    keys, _ = SavedModel(tmp_path / "model").table("t")
    assert sorted(keys.tolist()) == [*range(10), *range(60, 100)]


def test_evicting_outside_a_batch_or_from_no_table_is_refused() -> None:
    job = Job(embedded_session(), Schema(0, eg.Sync().spec(), (), ()), True)
    model = eg.Embedding("t", 2)
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=0.1))
    with pytest.raises(ConfigError, match=r"belongs inside job\.batches"):
        job.evict("t", torch.arange(3))
    for _ in job.epochs(1):
        for _ in job.batches({"t": np.arange(4)}, 4):
            with pytest.raises(ConfigError, match="there is no table 'u'; the model's tables are t"):
                job.evict("u", torch.arange(3))
            with pytest.raises(ConfigError, match="the ids are no tensor of int64 or int32"):
                job.evict("t", [1, 2])  # type: ignore[arg-type]
            model(torch.arange(2)).sum().backward()
            optimizer.step()
            with pytest.raises(ConfigError, match=r"before the batch's optimizer\.step"):
                job.evict("t", torch.arange(3))


@pytest.mark.parametrize("update", UPDATES[:2], ids=["sync", "async"])
def test_a_gradient_too_large_for_the_wire_leaves_its_batch_out_everywhere(
    update: eg.Sync | eg.Async, tmp_path: Path
) -> None:
    job = Job(embedded_session(3), Schema(0, update.spec(), (), (), Wire.FLOAT16), True)
    model = eg.Embedding("t", 2)
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=0.1))

    def train() -> None:
        for _ in job.epochs(1):
            for batch in job.batches({"t": np.arange(30)}, 10, shuffle=False):
                optimizer.zero_grad()
                factor = torch.where(batch["t"] == 7, 1e6, 1.0)[:, None]
                (model(batch["t"]) * factor).sum().backward()
                optimizer.step()

    with pytest.warns(UserWarning, match="NaN or infinity in the gradient of table 't'"):
        train()
    job.save_model(tmp_path / "model")
    assert sorted(SavedModel(tmp_path / "model").table("t")[0]) == list(range(10, 30))
