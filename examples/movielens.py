"""MovieLens on parameter servers: which films does a user rate 4 or 5?

In this one process:       python examples/movielens.py
As a job of processes:     evergrad run --pservers 2 --trainers 3 examples/movielens.py

`movielens_torch.py` is the same in plain PyTorch.
"""

import movielens_data as movielens
import torch
import torch.nn.functional as F
from torch import nn

import evergrad as eg


class Ranker(nn.Module):
    """Embeddings of user, film and their features, and a small network that scores them together."""

    def __init__(self):
        super().__init__()
        init = eg.init_rows.normal(std=0.05)
        self.user = eg.Embedding("user", 16, init=init)
        self.item = eg.Embedding("item", 16, init=init)
        self.age = eg.Embedding("age", 16, init=init)
        self.gender = eg.Embedding("gender", 16, init=init)
        self.occupation = eg.Embedding("occupation", 16, init=init)
        self.genres = eg.EmbeddingBag("genres", 16, mode="mean", init=init)
        self.head = nn.Sequential(nn.Linear(6 * 16, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch):
        """The logit of each sample of the batch."""
        single = [getattr(self, name)(batch[name]) for name in ("user", "item", "age", "gender", "occupation")]
        x = torch.cat([*single, self.genres(*batch["genres"])], dim=-1)
        return self.head(x).squeeze(-1)


def dataset(columns):
    """The columns for `job.batches`; genres are a list a sample."""
    return eg.data.Columns({**columns, "genres": eg.data.Ragged(*columns["genres"])})


def main():
    """Train, report the held-out AUC of each epoch, save the model and recommend with it."""
    args = movielens.arguments(__doc__)
    data = movielens.load(args.data)
    train, valid = map(dataset, data.split(args.seed))

    job = eg.init(update=eg.Sync(batches_per_step=4), seed=args.seed)
    model = Ranker()
    optimizer = job.optimizer(model, dense=eg.Adam(lr=1e-3), sparse=eg.Adagrad(lr=0.1))
    for _ in job.epochs(args.epochs):
        model.train()
        for batch in job.batches(train, batch_size=args.batch_size):
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            optimizer.step()
            job.report({"loss": loss.item()})
        model.eval()
        metrics = job.evaluate(lambda b: {"auc": eg.metrics.auc(model(b), b["label"])}, valid, batch_size=4096)
        job.report(metrics)

    job.save_model(args.out)
    if job.is_leader():
        model = Ranker()
        eg.load_model(model, args.out)
        movielens.print_recommendations(model, data)


if __name__ == "__main__":
    main()
