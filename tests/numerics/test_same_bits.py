"""Sources of difference, one by one: the trained model is the same for any numbers of trainers and pservers.

Every case is trained by one trainer with one pserver, by several of both, and by trainers that are killed; the saved
files, the totals of evaluations and the samples of each batch must be the same to the bit.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jobs import digests
from torch import nn

import evergrad as eg
from evergrad.job.batch import seed_generators
from evergrad.job.job import Job
from evergrad.messages import Schema, Wire
from evergrad.trainer.session import Session

from .crowd import Crowd

SEED, SAMPLES, BATCH, EPOCHS, KILLS = 7, 106, 8, 2, 6
USERS = np.array([0, -1, 2**63 - 1, -(2**63), *range(100, 120)])


class Ranker(nn.Module):
    """A table, a bag and a network of the given middle part."""

    def __init__(self, *middle: nn.Module, **options: Any) -> None:
        super().__init__()
        self.user = eg.Embedding("user", 4, **options)
        self.words = eg.EmbeddingBag("words", 4, mode="mean", init=eg.init_rows.uniform())
        self.into, self.middle, self.head = nn.Linear(8, 8), nn.Sequential(*middle), nn.Linear(8, 1)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        x = torch.cat([self.user(batch["user"]), self.words(*batch["words"])], dim=-1)
        return self.head(self.middle(torch.tanh(self.into(x)))).squeeze(-1)


class Tied(Ranker):
    """With a parameter used twice, a frozen one, and one that not every batch uses."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.middle[2].weight = self.middle[0].weight
        self.into.bias.requires_grad_(False)
        self.rare = nn.Parameter(torch.ones(()))

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        logits = super().forward(batch)
        return logits * self.rare if batch["id"][0] % 2 else logits


class MetInside(Ranker):
    """With rows that are known only in the middle of `forward`, before and after something random."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))
        self.more = eg.Embedding("more", 8, feature="nothing")

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        noise = torch.rand(len(batch["user"]))
        return super().forward(batch) + noise * self.more(batch["id"] % 11).sum(-1) * torch.rand(len(noise))


class Cancelling(nn.Module):
    """Gradients of which the sum over a step is 0 in the order of tasks, and 1 in others."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.weight = eg.Embedding("user", 1, init=eg.init_rows.zeros()), nn.Parameter(torch.zeros(()))

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        gradient = (2.0**60, 1.0, -(2.0**60))[batch["task"]]
        return gradient * (self.weight + self.user(torch.tensor([0])).sum())


class Counting(Ranker):
    """A model that remembers something which is no buffer."""

    calls = 0

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        self.calls += 1
        return super().forward(batch) * self.calls


class Augmented:
    """A torch dataset that changes its samples at random, with every generator there is."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        noise = torch.rand(()) + random.random() + np.random.random()
        return {
            "id": number,
            "user": self._columns["user"][number],
            "x": noise,
            "label": self._columns["label"][number],
        }


class OfNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.head = eg.Embedding("user", 4), nn.Linear(1, 1)

    def forward(self, batch: Mapping[str, Any]) -> torch.Tensor:
        return self.user(batch["user"]).sum(-1) + self.head(batch["x"].float()[:, None]).squeeze(-1)


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    user = rng.choice(USERS, SAMPLES)
    words = eg.data.Ragged.from_lists([rng.integers(0, 12, rng.integers(0, 5)) for _ in range(SAMPLES)])
    label = (rng.random(SAMPLES) < 0.3 + 0.4 * (user % 2)).astype(np.float32)
    return {"id": np.arange(SAMPLES), "user": user, "words": words, "label": label}


def cross_entropy(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch["label"].float())


def in_bfloat16(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch)
    assert logits.dtype == torch.bfloat16
    return F.binary_cross_entropy_with_logits(logits.float(), batch["label"])


def output(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    return model(batch)


def clipped(model: nn.Module) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05, "nothing was clipped"


@dataclass
class Case:
    """What is trained, and how."""

    model: Callable[[], nn.Module] = Ranker
    data: Callable[[], Any] = lambda: eg.data.Columns(columns())
    dense: Any = field(default_factory=lambda: eg.Adam(lr=0.05))
    sparse: Any = field(default_factory=lambda: eg.Adagrad(lr=0.1))
    loss: Callable[[nn.Module, Mapping[str, Any]], torch.Tensor] = cross_entropy
    after_backward: Callable[[nn.Module], None] = lambda model: None
    clears_gradients: bool = True
    tasks: int = 3
    wire: Wire = Wire.FLOAT32

    def train(self, session: Session, out: Path, seen: set[tuple[int, ...]], totals: set[tuple[int, str]]) -> None:
        """The script of each trainer."""
        job = Job(session, Schema(SEED, eg.Sync(self.tasks).spec(), (), (), self.wire), is_embedded=False)
        seed_generators(SEED)
        model, data = self.model(), self.data()
        optimizer = job.optimizer(model, dense=self.dense, sparse=self.sparse)
        for epoch in job.epochs(EPOCHS):
            for batch in job.batches(data, BATCH):
                seen.add((epoch, *batch["id"].tolist()))
                if self.clears_gradients:
                    optimizer.zero_grad()
                self.loss(model, {**batch, "task": job._batch.task.index}).backward()
                self.after_backward(model)
                optimizer.step()
            found = job.evaluate(lambda b: {"loss": self.loss(model, {**b, "task": 0})}, data, 16)
            totals.add((epoch, float(found["loss"]).hex()))
        job.save_model(out)


def at_step(step: int) -> float:
    return 0.1 / (1 + step)


def policy() -> Ranker:
    return Ranker(min_count=2, ttl=3, max_rows=16)


CASES = {
    "nothing special": Case(),
    "one batch a step": Case(tasks=1),
    "more tasks than trainers": Case(tasks=5),
    "dropout": Case(lambda: Ranker(nn.Dropout(0.4))),
    "batch norm": Case(lambda: Ranker(nn.BatchNorm1d(8))),
    "batch norm with a cumulative average": Case(lambda: Ranker(nn.BatchNorm1d(8, momentum=None))),
    "padding": Case(lambda: Ranker(padding_idx=100)),
    "tied, frozen and unused parameters": Case(Tied),
    "rows met inside forward": Case(MetInside),
    "a dataset that augments at random": Case(OfNoise, lambda: Augmented(columns())),
    "learning rates that are functions of the step": Case(dense=eg.SGD(lr=at_step), sparse=eg.Adam(lr=at_step)),
    "momentum and row-wise Adagrad": Case(
        dense=eg.SGD(lr=0.05, momentum=0.9, nesterov=True), sparse=eg.RowWiseAdagrad(lr=0.1)
    ),
    "AdamW and FTRL": Case(dense=eg.AdamW(lr=0.05), sparse=eg.FTRL(lr=0.1, l1=0.01)),
    "clipping by norm": Case(after_backward=clipped),
    "sums that depend on their order": Case(
        Cancelling, lambda: {"id": np.arange(4 * 3 * BATCH)}, eg.SGD(lr=1.0), eg.SGD(lr=1.0), output
    ),
    "gradients that the script never clears": Case(clears_gradients=False),
    "bfloat16 autocast": Case(loss=in_bfloat16),
    "bfloat16 on the wire": Case(wire=Wire.BFLOAT16),
    "admission, expiry and eviction": Case(policy),
}


@dataclass
class Found:
    """What a job has left behind."""

    model: dict[str, str]
    totals: set[tuple[int, str]]
    seen: set[tuple[int, ...]]


def train(case: Case, folder: Path, pservers: int, trainers: int, seed: int = 0, kills: int = 0) -> Found:
    torch.set_num_threads(1)
    out, seen, totals = folder / f"{pservers}-{trainers}-{kills}", set[tuple[int, ...]](), set[tuple[int, str]]()
    crowd = Crowd(pservers, trainers, lambda session: case.train(session, out, seen, totals), seed, kills).run()
    assert crowd.killed == kills
    return Found(digests(out), totals, seen)


@pytest.mark.parametrize("name", CASES)
def test_a_job_has_the_same_bits_with_any_trainers_and_pservers_and_any_of_them_killed(
    name: str, tmp_path: Path, seed: int
) -> None:
    case = CASES[name]
    alone = train(case, tmp_path, 1, 1)
    assert [epoch for epoch, _ in sorted(alone.totals)] == list(range(EPOCHS))
    first = sorted(n for epoch, *ids in alone.seen for n in ids if epoch == 0)
    assert first == list(range(len(first)))
    assert train(case, tmp_path, 3, 2, seed) == alone
    assert train(case, tmp_path, 2, 4, seed, KILLS) == alone


def test_what_a_script_remembers_by_itself_from_batch_to_batch_is_not_protected(tmp_path: Path, seed: int) -> None:
    """It shows too that these tests see a difference where there is one."""
    case = Case(Counting)
    assert train(case, tmp_path, 1, 2, seed).model != train(case, tmp_path, 1, 1).model
