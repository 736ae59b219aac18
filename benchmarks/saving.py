"""What checkpoints cost a job that trains: samples a second and steps with one always in progress, and with none.

One job of real processes under `evergrad run`, one pserver and one trainer, goes on from a checkpoint of many rows and
updates 20,000 of them in each step. Stretches with and without checkpoints follow each other in the same job.
`python benchmarks/saving.py --rows 20000000` shows it for another size.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import checkpoints
import numpy as np
import psutil
import torch
from tables import Figure, at_least, at_most, bound
from torch import nn

import evergrad as eg
from evergrad.checkpoint.storage import Storage

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from jobs import Launched

ROWS, DIM, BATCH, IDS = checkpoints.ROWS, checkpoints.DIM, 2048, 10
BATCHES = 3000
"""Of an epoch. Its end waits until a checkpoint is durable, so the first step after it is not counted."""
WIDTH = 512
STRETCH_S, TURNS, WARM_S = 10.0, 2, 4.0
ASK_EVERY = 20
"""Steps from one call of `save_checkpoint` to the next: a checkpoint begins soon after the one before is complete."""
FOLDER = checkpoints.FOLDER


# -- the script --------------------------------------------------------------------------------------------------------


def train(folder: Path, rows: int) -> None:
    """Train for ever; FOLDER/steps gets each step's end and length; while FOLDER/on is there checkpoints are made."""
    job = eg.init(checkpoints=eg.Checkpoints(folder / "made", keep=1), warm_start=folder / "given")
    user = eg.Embedding("user", DIM, init=eg.init_rows.zeros())
    optimizer = job.optimizer(nn.ModuleList([user]), dense=eg.SGD(lr=0.1), sparse=eg.Adagrad(lr=0.05))
    weights = [torch.randn(IDS * DIM, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, 1)]
    keys = checkpoints.keys_of(rows)
    picks = np.random.default_rng(1).integers(0, rows, (BATCH * BATCHES, IDS))
    data = eg.data.Columns({"user": keys[picks]})
    number = 0
    with (folder / "steps").open("w", buffering=1) as steps:
        for _ in job.epochs(1_000_000):
            began_s = None
            for batch in job.batches(data, batch_size=BATCH):
                optimizer.zero_grad()
                x = user(batch["user"]).flatten(1)
                for weight in weights[:-1]:
                    x = (x @ weight * 0.05).relu()
                (x @ weights[-1]).mean().backward()
                optimizer.step()
                number += 1
                if number % ASK_EVERY == 0 and (folder / "on").exists():
                    job.save_checkpoint()
                now_s = time.monotonic()
                if began_s is not None:
                    steps.write(f"{now_s} {now_s - began_s}\n")
                began_s = now_s


# -- what is measured --------------------------------------------------------------------------------------------------


def figures(quick: bool = False) -> Iterator[Figure]:
    """All figures for both sizes."""
    rows = 200_000 if quick else ROWS
    yield from saving(rows, TURNS, quick)
    yield from saving(4 * rows, 1, quick)


def saving(rows: int, turns: int = 1, quick: bool = False) -> Iterator[Figure]:
    """A job of so many rows, with and without checkpoints in turn."""
    with tempfile.TemporaryDirectory(prefix="evergrad-bench-", dir=FOLDER) as scratch:
        folder = Path(scratch)
        with Storage(folder / "given") as storage:
            checkpoints.save_of(storage, rows)
        job = Launched(folder, Path(__file__), "--train", folder, "--rows", rows, pservers=1, trainers=1)
        try:
            job.until(lambda s: s.samples > 0, "training", within_s=300.0)
            yield from _compared(job, folder, rows, turns, 2.0 if quick else STRETCH_S)
        finally:
            job.kill()
            job.close()


def _compared(job: Launched, folder: Path, rows: int, turns: int, seconds: float) -> Iterator[Figure]:
    without, during, most, took = [], [], 0, []
    pserver = job.members()["pserver-0"]
    time.sleep(WARM_S)
    _checkpoint(job, folder, pserver)  # once unmeasured: memory that nobody has used yet takes longer to get
    resident = pserver.memory_info().rss
    for _ in range(turns):
        time.sleep(seconds)
        without += _steps(folder, time.monotonic() - seconds)
        began_s = time.monotonic()
        ended_s, peak = _checkpoint(job, folder, pserver)
        during += _steps(folder, began_s, ended_s)
        took.append(ended_s - began_s)
        most = max(most, peak - resident)
    share = float(np.mean(without)) / float(np.mean(during))
    about = f"{rows:,} rows x ({DIM} + {DIM})"
    median = float(np.median(without))
    touched = rows * 8 * DIM  # nearly: the batches of a checkpoint meet most rows
    yield at_least(f"samples/s with a checkpoint in progress / without, {about}", share, "x", 0.95)
    yield at_most(f"slowest step with checkpoints / median step, {about}", max(during) / median, "x", 3.0)
    yield bound(f"slowest step without / median step, {about}", max(without) / median, "x")
    yield bound(f"median step, {about}", median * 1e3, "ms")
    yield bound(f"a checkpoint, begun to complete, {about}", max(took), "s")
    yield at_most(
        f"memory of the pserver with a checkpoint, beyond rows touched, {about}", (most - touched) / 1e6, "MB", 64.0
    )


def _checkpoint(job: Launched, folder: Path, pserver: psutil.Process) -> tuple[float, int]:
    """Have a checkpoint made; returns when it was complete, and the most memory meanwhile."""
    before, peak = _made(job), 0
    (folder / "on").touch()
    while _made(job) == before:
        peak = max(peak, pserver.memory_info().rss)
        time.sleep(0.02)
    ended_s = time.monotonic()
    (folder / "on").unlink()
    _until_done(job)
    return ended_s, peak


def _made(job: Launched) -> int:
    told = job.status().checkpoints
    assert told is not None
    assert told.failure is None, told.failure
    return told.made


def _until_done(job: Launched) -> None:
    """Until the checkpoint that was begun meanwhile is complete, if one was."""
    made, since_s = _made(job), time.monotonic()
    while time.monotonic() - since_s < STRETCH_S:
        time.sleep(0.1)
        if _made(job) != made:
            return


def _steps(folder: Path, since_s: float, until_s: float = inf) -> list[float]:
    """How long the steps took that ended between these times."""
    lines = (line.split() for line in (folder / "steps").read_text().splitlines() if line.count(" ") == 1)
    return [float(took) for at, took in lines if since_s < float(at) <= until_s]


def main() -> int:
    """Measure and show, or train."""
    parser = argparse.ArgumentParser(description="Measure what checkpoints cost a job that trains.")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the table")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.rows)
        return 0
    for figure in saving(options.rows):
        print(f"{figure['name']}: {figure['value']:.2f} {figure['unit']} ({figure['target']})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
