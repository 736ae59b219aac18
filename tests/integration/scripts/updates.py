"""The update rules that the scripts of tests and of `make chaos` can be told to train with."""

import argparse

import evergrad as eg

UPDATES = {
    "sync": eg.Sync(batches_per_step=4),
    "async": eg.Async(batches_per_task=3),
}


def add_rule(parser: argparse.ArgumentParser) -> None:
    """The option that chooses one."""
    parser.add_argument("--rule", choices=UPDATES, default="sync")
