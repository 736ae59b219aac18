"""A training whose computing is mostly sleep, so that a few cores are enough for many trainers: `trouble.py` runs it.

Each trainer writes what it has computed so far to FOLDER/NAME: seconds since the machine started, and seconds of them
spent computing.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import evergrad as eg

COMPUTE_S, SLOWER = 0.03, 5
BATCH, KEYS, DIM = 64, 10_000, 16
WRITE_EVERY_S = 0.1

UPDATES = {
    "sync": eg.Sync(batches_per_step=4),
    "sync with a spare": eg.Sync(batches_per_step=4, backup_after=2 * COMPUTE_S),
    "sync of 12": eg.Sync(batches_per_step=12),
    "bounded": eg.Async(max_staleness=8),
    "async": eg.Async(),
}


class Model(nn.Module):
    """One table and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.id = eg.Embedding("id", DIM)
        self.head = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logit of each sample."""
        return self.head(self.id(batch["id"])).squeeze(-1)


def main() -> None:
    """Train until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", choices=UPDATES, required=True)
    parser.add_argument("--slow", default="", help="the name of the trainer that is slow")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    name = os.environ["EVERGRAD_NAME"]
    compute_s = COMPUTE_S * (SLOWER if name == options.slow else 1)
    ids = np.random.default_rng(0).integers(0, KEYS, 1_000_000)
    data = eg.data.Columns({"id": ids, "label": (ids % 2).astype(np.float32)})

    job = eg.init(update=UPDATES[options.update], seed=0)
    model = Model()
    optimizer = job.optimizer(model, dense=eg.Adam(lr=1e-3), sparse=eg.Adagrad(lr=0.05))
    computed_s, write_s = 0.0, 0.0
    for _ in job.epochs(1000):
        for batch in job.batches(data, BATCH):
            began_s = time.monotonic()
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
            time.sleep(max(0.0, compute_s - (time.monotonic() - began_s)))
            ended_s = time.monotonic()
            computed_s += ended_s - began_s
            if ended_s >= write_s:
                write_s = ended_s + WRITE_EVERY_S
                (options.out / f".{name}").write_text(f"{ended_s} {computed_s}")
                (options.out / f".{name}").replace(options.out / name)
            optimizer.step()


if __name__ == "__main__":
    main()
