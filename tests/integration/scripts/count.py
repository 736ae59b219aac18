"""Each gradient leaves a trace: column *e* of a sample's row says how often it was applied in epoch *e*.

Rows start as zeros and the rule is SGD with a learning rate of 1. In `Async` an application takes 1 from the sample's
row; in `Sync` it takes 1/4, the share of its batch in a step of four equal batches. `applied` falls by 1 with each
update.
"""

import holding
import numpy as np
import torch
import updates
from torch import nn

import evergrad as eg


class Trace(nn.Module):
    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.trace = eg.Embedding("trace", epochs, init=eg.init_rows.zeros(), feature="id")
        self.applied = nn.Parameter(torch.zeros(3))

    def forward(self, ids, epoch: int):
        return self.trace(ids)[:, epoch].sum() + self.applied.sum()


def main() -> None:
    parser = holding.parser(__doc__)
    updates.add_rule(parser)
    options = parser.parse_args()
    hold = holding.Holding(options)
    data = {"id": np.arange(options.samples)}

    job = eg.init(update=updates.UPDATES[options.rule], seed=options.seed, checkpoints=holding.checkpoints(options))
    model = Trace(options.epochs)
    optimizer = job.optimizer(model, dense=eg.SGD(lr=1.0), sparse=eg.SGD(lr=1.0))
    for epoch in job.epochs(options.epochs):
        for batch in job.batches(data, batch_size=options.batch_size):
            hold.batch(epoch, batch["id"].tolist())
            optimizer.zero_grad()
            model(batch["id"], epoch).backward()
            optimizer.step()
    hold.at("end")
    job.save_model(options.out)


if __name__ == "__main__":
    main()
