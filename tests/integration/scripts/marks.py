"""Marks every sample whose gradient was applied, and misbehaves as told: slow trainers, exceptions, unreadable data.

Rows start as zeros and the rule is SGD with a learning rate of 1: a sample's row in the column of an epoch ends as
minus the share that its batch had in its update, and as zero if its batch was in none. `applied` counts updates. With
`--course FILE` each batch begun and done is noted there, by all trainers in their order.
"""

import ast
import os
import time
from pathlib import Path

import holding
import numpy as np
import torch
from torch import nn

import evergrad as eg


class Marks(nn.Module):
    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.mark = eg.Embedding("mark", epochs, init=eg.init_rows.zeros(), feature="id")
        self.applied = nn.Parameter(torch.zeros(1))

    def forward(self, ids, epoch: int):
        return self.mark(ids)[:, epoch].sum() + self.applied.sum()


class Samples:
    """Sample numbers, one of which cannot be read."""

    def __init__(self, count: int, unreadable: int) -> None:
        self._count, self._unreadable = count, unreadable

    def __len__(self) -> int:
        return self._count

    def fingerprint(self) -> str:
        return str(self._count)

    def fetch(self, ids):
        if self._unreadable in ids:
            raise eg.errors.DataError(f"sample {self._unreadable} cannot be read")
        return {"id": torch.from_numpy(ids)}


def main() -> None:
    parser = holding.parser(__doc__)
    parser.add_argument("--rule", required=True, help="Sync or Async")
    parser.add_argument("--with", dest="options", default="{}", help="its options, as a dict")
    parser.add_argument("--raise-at", type=int, default=-1, metavar="SAMPLE")
    parser.add_argument("--unreadable", type=int, default=-1, metavar="SAMPLE")
    parser.add_argument("--slow-trainer", default="", help="this one takes --slow-for seconds a batch")
    parser.add_argument("--slow-for", type=float, default=0.3)
    parser.add_argument("--course", type=Path)
    options = parser.parse_args()
    hold = holding.Holding(options)
    is_slow = os.environ.get("EVERGRAD_NAME") == options.slow_trainer

    def note(what: str) -> None:
        if options.course:
            with options.course.open("a") as course:
                course.write(f"{os.getpid()} {what}\n")

    job = eg.init(update=getattr(eg, options.rule)(**ast.literal_eval(options.options)), seed=options.seed)
    model = Marks(options.epochs)
    optimizer = job.optimizer(model, dense=eg.SGD(lr=1.0), sparse=eg.SGD(lr=1.0))
    for epoch in job.epochs(options.epochs):
        for batch in job.batches(Samples(options.samples, options.unreadable), batch_size=options.batch_size):
            note("begins")
            hold.batch(epoch, batch["id"].tolist())
            if is_slow:
                time.sleep(options.slow_for)
            if options.raise_at in batch["id"]:
                raise ValueError(f"sample {options.raise_at} is bad")
            optimizer.zero_grad()
            model(batch["id"], epoch).backward()
            optimizer.step()
            note("done")
        print(f"evaluated {job.evaluate(lambda batch: {'n': len(batch['id'])}, {'id': np.arange(4)}, batch_size=4)}")
    job.save_model(options.out)


if __name__ == "__main__":
    main()
