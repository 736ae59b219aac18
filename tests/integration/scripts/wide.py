"""A table so large that saving it takes a while."""

import holding
import numpy as np
import torch

import evergrad as eg


def main() -> None:
    parser = holding.parser(__doc__)
    parser.set_defaults(samples=240_000, batch_size=30_000, epochs=1)
    options = parser.parse_args()
    hold = holding.Holding(options)

    job = eg.init(update=eg.Sync(batches_per_step=2), seed=options.seed)
    model = torch.nn.ModuleList([eg.Embedding("id", 32)])
    optimizer = job.optimizer(model, sparse=eg.SGD(lr=0.1))
    for epoch in job.epochs(options.epochs):
        for batch in job.batches({"id": np.arange(options.samples)}, batch_size=options.batch_size):
            hold.at(f"epoch:{epoch}")
            optimizer.zero_grad()
            model[0](batch["id"]).square().mean().backward()
            optimizer.step()
    hold.at("end")
    job.save_model(options.out)


if __name__ == "__main__":
    main()
