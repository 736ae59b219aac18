"""A click model with 26 tables, as a job of processes, against plain PyTorch in one process."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import evergrad as eg

TABLES, KEYS, DIM, DENSE, BATCH = 26, 1_000_000, 16, 13, 2048
OUT = "EVERGRAD_BENCHMARK_OUT"
ROUNDS = 3


def columns(batches: int) -> dict[str, np.ndarray]:
    """Zipf ids, dense features and labels for so many batches."""
    rng = np.random.default_rng(0)
    n = batches * BATCH
    data = {f"f{k}": np.minimum(rng.zipf(1.2, size=n), KEYS) - 1 for k in range(TABLES)}
    dense = rng.random((n, DENSE), dtype=np.float32)
    return {**data, "dense": dense, "y": (rng.random(n) < 0.3).astype(np.float32)}


class Click(nn.Module):
    """One embedding a feature, and a network over all of them and the dense features."""

    def __init__(self, tables: list[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)
        sizes = (DENSE + TABLES * DIM, 256), (256, 128), (128, 1)
        layers = [layer for a, b in sizes for layer in (nn.Linear(a, b), nn.ReLU())]
        self.head = nn.Sequential(*layers[:-1])

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logit of each sample."""
        rows = [table(batch[f"f{k}"]) for k, table in enumerate(self.tables)]
        return self.head(torch.cat([batch["dense"], *rows], 1)).squeeze(-1)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch."""
    return F.binary_cross_entropy_with_logits(model(batch), batch["y"])


def plain(batches: int) -> float:
    """Samples a second of the second epoch of one process of plain PyTorch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Click([nn.Embedding(KEYS, DIM, sparse=True) for _ in range(TABLES)])
    rows = torch.optim.Adagrad(model.tables.parameters(), lr=0.05)
    dense = torch.optim.Adam(model.head.parameters(), lr=1e-3)
    data = columns(batches)
    order = np.random.default_rng(1).permutation(batches * BATCH).reshape(batches, BATCH)
    for _ in range(2):
        began = time.perf_counter()
        for ids in order:
            batch = {name: torch.from_numpy(column[ids]) for name, column in data.items()}
            rows.zero_grad()
            dense.zero_grad()
            loss_of(model, batch).backward()
            rows.step()
            dense.step()
        rate = batches * BATCH / (time.perf_counter() - began)
    return rate


def script(rule: str, batches: int) -> None:
    """What each trainer of the job runs: writes its samples a second of the second epoch."""
    job = eg.init(update=eg.Sync() if rule == "sync" else eg.Async())
    model = Click([eg.Embedding(f"f{k}", DIM) for k in range(TABLES)])
    optimizer = job.optimizer(model, dense=eg.Adam(lr=1e-3), sparse=eg.Adagrad(lr=0.05))
    data = eg.data.Columns(columns(batches))
    for _ in job.epochs(2):  # the first makes most rows
        began, count = time.perf_counter(), 0
        for batch in job.batches(data, BATCH):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            count += 1
            ended = time.perf_counter()  # not what the end of an epoch takes, which comes with a checkpoint
        rate = count * BATCH / (ended - began)
    Path(os.environ[OUT], f"{os.getpid()}.json").write_text(json.dumps(rate))


def job_rate(rule: str, trainers: int, batches: int) -> float:
    """Samples a second of a job with one pserver, all its trainers together."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "evergrad", "run", "--trainers", str(trainers), "--log-dir", f"{folder}/logs"]
        command += [__file__, rule, str(batches)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, OUT: folder})
        return float(sum(json.loads(file.read_text()) for file in Path(folder).glob("*.json")))


def plain_rate(batches: int) -> float:
    """Samples a second of plain PyTorch, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "plain", str(batches)], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def figures(quick: bool = False) -> Iterator[dict[str, object]]:
    """Each kind of job in turn with plain PyTorch; the median of the ratios."""
    batches = 20 if quick else 160
    for name, rule, trainers, target in (
        ("1 pserver + 1 trainer, Sync", "sync", 1, None),
        ("1 pserver + 1 trainer, Async", "async", 1, 1.6),
        ("1 pserver + 2 trainers, Async", "async", 2, 2.4),
    ):
        pairs = [(job_rate(rule, trainers, batches), plain_rate(batches)) for _ in range(1 if quick else ROUNDS)]
        value = statistics.median(ours / torchs for ours, torchs in pairs)
        ours, torchs = pairs[-1]
        yield {
            "name": f"samples/s of the click model, {name} / plain PyTorch",
            "value": value,
            "unit": f"x ({ours:,.0f} / {torchs:,.0f} samples/s)",
            "target": f">= {target}" if target else "-",
            "met": value >= target if target else None,
        }


if __name__ == "__main__":
    if len(sys.argv) == 3:
        kind, count = sys.argv[1], int(sys.argv[2])
        print(plain(count)) if kind == "plain" else script(kind, count)
    else:
        for figure in figures("--quick" in sys.argv):
            print(figure)
