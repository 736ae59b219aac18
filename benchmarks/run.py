"""What Evergrad costs beside plain PyTorch: `make bench`. Prints one table, and the same as JSON with `--json FILE`.

Each line does the same work twice in this process, with PyTorch and with Evergrad; the ratio is what to compare.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table as Grid
from torch import nn

import evergrad as eg
from evergrad.init_rows import zeros
from evergrad.kernels.warm import warm
from evergrad.messages import TableSpec
from evergrad.placement import slots_owned
from evergrad.pserver.table import Table

ROWS, DIM, KEYS = 1_000_000, 16, 8192
USERS, ITEMS, SAMPLES, BATCH = 20_000, 5_000, 60_000, 512
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Measured:
    """One line: how many a second of what, with PyTorch and with Evergrad."""

    name: str
    unit: str
    torch: float
    evergrad: float

    @property
    def ratio(self) -> float:
        """Evergrad's rate over PyTorch's."""
        return self.evergrad / self.torch


def main() -> int:
    """Measure everything and show it."""
    parser = argparse.ArgumentParser(description="Measure Evergrad against plain PyTorch.")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    warm()
    lines = [*tables(), steps()]
    show(lines)
    if options.json:
        numbers = [{**asdict(line), "ratio": line.ratio} for line in lines]
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


def show(lines: list[Measured]) -> None:
    """Print the table."""
    grid = Grid("measured", "unit", "PyTorch", "Evergrad", "ratio")
    for line in lines:
        numbers = (f"{line.torch:,.0f}", f"{line.evergrad:,.0f}", f"{line.ratio:.2f}")
        grid.add_row(line.name, line.unit, *numbers)
    Console(width=110).print(grid)


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several rounds, after one that does not count."""
    work()
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


# -- one table ---------------------------------------------------------------------------------------------------------


def tables() -> Iterator[Measured]:
    """Reading and updating random rows of a table of a million, all in one thread."""
    rng = np.random.default_rng(0)
    keys = rng.choice(ROWS, KEYS, replace=False)
    grads = rng.standard_normal((KEYS, DIM), dtype=np.float32)
    weight = nn.Parameter(torch.zeros(ROWS, DIM))
    optimizer = torch.optim.Adagrad([weight], lr=0.01)
    weight.grad = torch.sparse_coo_tensor(torch.from_numpy(keys)[None], torch.from_numpy(grads), weight.shape)
    table = full_table()
    ids = torch.from_numpy(keys)
    yield rows("pull", lambda: F.embedding(ids, weight), lambda: table.pull(keys, False))
    yield rows("Adagrad", optimizer.step, lambda: table.update([(keys, grads, BATCH)], BATCH, 0.01))


def rows(name: str, plain: Callable[[], object], ours: Callable[[], object]) -> Measured:
    """A line about a table."""
    name = f"table {name}, {KEYS} of {ROWS:,} rows x {DIM}"
    return Measured(name, "rows/s", KEYS / best_s(plain), KEYS / best_s(ours))


def full_table() -> Table:
    """A table in which all rows have been made."""
    table = Table(TableSpec("user", DIM, eg.Adagrad(lr=0.01).spec(), zeros()), 0, slots_owned(0, 1))
    for part in np.array_split(np.arange(ROWS), 64):
        table.update([(part, np.zeros((part.size, DIM), np.float32), 1)], 1, 0.0)
    return table


# -- a whole training --------------------------------------------------------------------------------------------------


class Ranker(nn.Module):
    """Two embeddings and a small network."""

    def __init__(self, user: nn.Module, item: nn.Module) -> None:
        super().__init__()
        self.user, self.item = user, item
        self.head = nn.Sequential(nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The logit of each sample."""
        return self.head(torch.cat([self.user(batch["user"]), self.item(batch["item"])], dim=-1)).squeeze(-1)


def steps() -> Measured:
    """Training steps a second of the same model, Evergrad's embedded in this process."""
    rng = np.random.default_rng(0)
    columns = {
        "user": rng.integers(0, USERS, SAMPLES),
        "item": rng.integers(0, ITEMS, SAMPLES),
        "label": rng.integers(0, 2, SAMPLES).astype(np.float32),
    }
    name = f"embedded training, batch {BATCH}, two tables"
    return Measured(name, "steps/s", plain_rate(columns), embedded_rate(columns))


def plain_rate(columns: dict[str, np.ndarray]) -> float:
    """Steps a second of plain PyTorch."""
    model = Ranker(nn.Embedding(USERS, DIM, sparse=True), nn.Embedding(ITEMS, DIM, sparse=True))
    sparse = torch.optim.Adagrad([model.user.weight, model.item.weight], lr=0.05)
    dense = torch.optim.Adam(model.head.parameters(), lr=1e-3)
    order = np.random.default_rng(1).permutation(SAMPLES)
    began = time.perf_counter()
    for start in range(0, SAMPLES, BATCH):
        ids = order[start : start + BATCH]
        batch = {name: torch.from_numpy(column[ids]) for name, column in columns.items()}
        sparse.zero_grad()
        dense.zero_grad()
        F.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
        sparse.step()
        dense.step()
    return SAMPLES / BATCH / (time.perf_counter() - began)


def embedded_rate(columns: dict[str, np.ndarray]) -> float:
    """Steps a second of the same loop with Evergrad."""
    job = eg.init(update=eg.Sync(), seed=0)
    model = Ranker(eg.Embedding("user", DIM), eg.Embedding("item", DIM))
    optimizer = job.optimizer(model, dense=eg.Adam(lr=1e-3), sparse=eg.Adagrad(lr=0.05))
    data = eg.data.Columns(columns)
    rate = 0.0
    for _ in job.epochs(2):  # the first makes the rows and does not count
        began = time.perf_counter()
        for batch in job.batches(data, batch_size=BATCH):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(batch), batch["label"]).backward()
            optimizer.step()
        rate = SAMPLES / BATCH / (time.perf_counter() - began)
    return rate


if __name__ == "__main__":
    sys.exit(main())
