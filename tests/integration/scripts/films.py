"""The MovieLens example with BatchNorm and dropout in its model, on a part of the ratings."""

import sys

import holding
import numpy as np
import torch.nn.functional as F
import updates
from torch import nn

import evergrad as eg

sys.path.append(str(holding.ROOT / "examples"))
import movielens
import movielens_data


class Ranker(movielens.Ranker):
    """The example's, with another head."""

    def __init__(self) -> None:
        super().__init__()
        head = (nn.Linear(6 * 16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1))
        self.head = nn.Sequential(*head)


def dataset(samples: int) -> eg.data.Columns:
    """So many ratings, drawn at random."""
    ratings = movielens_data.load()
    rows = np.random.default_rng(0).permutation(len(ratings.rating))[:samples]
    columns = ratings.columns(ratings.user[rows], ratings.item[rows])
    return movielens.dataset({**columns, "label": (ratings.rating[rows] >= 4).astype(np.float32)})


def main() -> None:
    parser = holding.parser(__doc__)
    parser.set_defaults(samples=12_000, batch_size=64)
    updates.add_rule(parser)
    options = parser.parse_args()
    hold = holding.Holding(options)
    train = dataset(options.samples)

    job = eg.init(update=updates.UPDATES[options.rule], seed=options.seed, checkpoints=holding.checkpoints(options))
    model = Ranker()
    optimizer = job.optimizer(model, dense=eg.Adam(lr=1e-3), sparse=eg.Adagrad(lr=0.1))
    for epoch in job.epochs(options.epochs):
        for batch in job.batches(train, batch_size=options.batch_size):
            hold.batch(epoch, ())
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
            optimizer.step()
    hold.at("end")
    job.save_model(options.out)


if __name__ == "__main__":
    main()
