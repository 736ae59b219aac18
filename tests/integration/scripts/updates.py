"""The update rules that the scripts of tests and of `make chaos` can be told to train with."""

import argparse

import evergrad as eg

UPDATES = {
    "sync": eg.Sync(batches_per_step=4),
    "async": eg.Async(batches_per_task=3),
    "bounded": eg.Async(batches_per_task=3, max_staleness=2),
    "local-sgd": eg.LocalSGD(steps=3, tasks_per_round=4, outer=eg.SGD(lr=0.7, momentum=0.9, nesterov=True)),
}


def add_rule(parser: argparse.ArgumentParser) -> None:
    """The option that chooses one."""
    parser.add_argument("--rule", choices=UPDATES, default="sync")
