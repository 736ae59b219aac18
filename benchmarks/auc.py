"""How well each update rule learns: held-out AUC on MovieLens 100K of the example's model, four trainers, three seeds.

All rules make the same number of updates, each from the gradients of about 512 ratings.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch.nn.functional as F

import evergrad as eg

sys.path.append(str(Path(__file__).parents[1] / "tools"))
sys.path.append(str(Path(__file__).parents[1] / "examples"))
import movielens
import movielens_data

PSERVERS, TRAINERS, SEEDS, EPOCHS = 2, 4, (0, 1, 2), 6
WITHIN_S = 900.0
BEHIND = 0.002
"""What bounded staleness may cost against `Sync`."""


class Rule(NamedTuple):
    """An update rule, and the batches with which it makes as many updates as the others."""

    title: str
    update: eg.Sync | eg.Async
    batch_size: int


RULES = {
    "sync": Rule("Sync(4)", eg.Sync(batches_per_step=4), 128),
    "async": Rule("Async()", eg.Async(), 512),
}


def script(name: str, seed: int, epochs: int, out: Path) -> None:
    """What each trainer runs: writes the AUC after the last epoch."""
    train, valid = map(movielens.dataset, movielens_data.load().split(seed))
    rule = RULES[name]
    job = eg.init(update=rule.update, seed=seed)
    model = movielens.Ranker()
    optimizer = job.optimizer(model, dense=eg.Adam(lr=1e-3), sparse=eg.Adagrad(lr=0.1))
    for _ in job.epochs(epochs):
        for batch in job.batches(train, rule.batch_size):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
            optimizer.step()
        metrics = job.evaluate(lambda b: {"auc": eg.metrics.auc(model(b), b["label"])}, valid, batch_size=4096)
    (out / f"{os.getpid()}.json").write_text(json.dumps(metrics))


def auc(name: str, seed: int, epochs: int) -> float:
    """The held-out AUC after the last epoch of a job."""
    from jobs import Launched  # not for the trainers

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        args = ("--rule", name, "--seed", seed, "--epochs", epochs, "--out", folder)
        with Launched(folder, Path(__file__), *args, pservers=PSERVERS, trainers=TRAINERS) as job:
            if job.launcher.wait(WITHIN_S) != 0:
                raise RuntimeError(job.text)
        (found,) = {file.read_text() for file in folder.glob("*.json")}
        return float(json.loads(found)["auc"])


def figures(quick: bool = False) -> Iterator[dict[str, object]]:
    """The mean over seeds of each rule, and how far it is behind `Sync`."""
    seeds, epochs = (SEEDS[:1], 1) if quick else (SEEDS, EPOCHS)
    movielens_data.load()  # fetched once, before trainers ask for it all at once
    first: list[float] = []
    for name, rule in RULES.items():
        found = [auc(name, seed, epochs) for seed in seeds]
        first = first or found
        behind = statistics.mean(first) - statistics.mean(found)
        is_bounded = isinstance(rule.update, eg.Async) and "max_staleness" in rule.title
        yield {
            "name": f"held-out AUC on MovieLens 100K, {TRAINERS} trainers, {rule.title}",
            "value": statistics.mean(found),
            "unit": f"(seeds: {', '.join(f'{value:.4f}' for value in found)}; {behind:+.4f} behind Sync)",
            "target": f"<= {BEHIND} behind" if is_bounded else "-",
            "met": behind <= BEHIND if is_bounded else None,
        }


def main() -> None:
    """As a script of trainers, or all rules in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed and epoch")
    parser.add_argument("--rule", choices=RULES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rule:
        script(options.rule, options.seed, options.epochs, options.out)
        return
    for figure in figures(options.quick):
        print(figure, flush=True)


if __name__ == "__main__":
    main()
