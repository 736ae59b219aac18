"""A small but complete training: a shared table, a bag, BatchNorm, dropout, a tied and a frozen parameter."""

import holding
import numpy as np
import torch
import torch.nn.functional as F
import updates
from torch import nn

import evergrad as eg


class Ranker(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.user = eg.Embedding("user", dim)
        self.item = eg.Embedding("item", dim)
        self.last = eg.Embedding("item", dim, feature="last")
        self.tags = eg.EmbeddingBag("tags", dim, mode="mean", init=eg.init_rows.uniform())
        self.into = nn.Sequential(nn.Linear(4 * dim, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Dropout(0.2))
        self.there, self.back = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.back.weight = self.there.weight
        self.scale = nn.Parameter(torch.rand(dim), requires_grad=False)
        self.head = nn.Linear(dim, 1)

    def forward(self, batch):
        rows = [self.user(batch["user"]), self.item(batch["item"]), self.last(batch["last"]), self.tags(*batch["tags"])]
        x = self.into(torch.cat(rows, dim=-1))
        return self.head(self.back(torch.tanh(self.there(x) * self.scale))).squeeze(-1)


def dataset(samples: int, seed: int) -> eg.data.Columns:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, samples)
    tags = eg.data.Ragged(random.integers(0, 30, lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))
    every = np.iinfo(np.int64)
    users = np.append(random.integers(every.min, every.max, 200, endpoint=True), [every.min, -1, 0, every.max])
    columns = {"user": random.choice(users, samples), "item": random.integers(0, 300, samples)}
    label = ((columns["user"] ^ columns["item"]) & 1).astype(np.float32)
    rest = {"last": random.integers(0, 300, samples), "tags": tags, "label": label, "id": np.arange(samples)}
    return eg.data.Columns({**columns, **rest})


def main() -> None:
    parser = holding.parser(__doc__)
    parser.add_argument("--dim", type=int, default=8)
    updates.add_rule(parser)
    options = parser.parse_args()
    hold = holding.Holding(options)
    train, valid = dataset(options.samples, 1), dataset(300, 2)

    job = eg.init(update=updates.UPDATES[options.rule], seed=options.seed, checkpoints=holding.checkpoints(options))
    model = Ranker(options.dim)
    optimizer = job.optimizer(model, dense=eg.Adam(lr=lambda step: 1e-2 / (1 + step / 50)), sparse=eg.Adagrad(lr=0.05))

    def score(batch):
        hold.at(f"evaluate:{epoch}")
        scores = model(batch)
        loss = F.binary_cross_entropy_with_logits(scores, batch["label"], reduction="none")
        return {"auc": eg.metrics.auc(scores, batch["label"]), "loss": eg.metrics.mean(loss), "count": len(scores)}

    for epoch in job.epochs(options.epochs):
        for batch in job.batches(train, batch_size=options.batch_size):
            hold.batch(epoch, batch["id"].tolist())
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            optimizer.step()
            job.report({"loss": loss.item()})
        metrics = job.evaluate(score, valid, batch_size=64)
        job.report(metrics)
        if job.is_leader():
            print(f"epoch {epoch} totals {metrics!r}")
    hold.at("end")
    job.save_model(options.out)


if __name__ == "__main__":
    main()
