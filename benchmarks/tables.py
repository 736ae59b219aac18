"""What a table costs beside what memory allows and beside PyTorch: one function per figure.

Each measures both sides of a ratio in turns in this process, on one thread, with other keys in every turn (so that the
keys of one turn are no longer in a cache in the next), and takes the median of each side in seconds of processor time
of this thread, which waiting for a processor does not lengthen (other processes' use of memory and caches does).
`python benchmarks/tables.py` shows all; `--rows` and `--inserts` set the sizes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypedDict

import numpy as np
import torch
from torch import nn

import evergrad as eg
from evergrad.init_rows import zeros
from evergrad.kernels import gather, index
from evergrad.kernels.warm import warm
from evergrad.messages import TableSpec
from evergrad.optim import Rule
from evergrad.placement import slots_owned
from evergrad.pserver.rules import apply_rows
from evergrad.pserver.table import Table

ROWS, INSERTS = 8_000_000, 20_000_000
DIM, KEYS = 32, 50_000
TURNS = 40
PAGE_BYTES = 4096


class Figure(TypedDict):
    """One line of the table. `met` says whether `value` is on the right side of `target`."""

    name: str
    value: float
    unit: str
    target: str
    met: bool | None


def at_most(name: str, value: float, unit: str, limit: float) -> Figure:
    """A figure that should be small."""
    return Figure(name=name, value=value, unit=unit, target=f"<= {limit:g}", met=value <= limit)


def at_least(name: str, value: float, unit: str, limit: float) -> Figure:
    """A figure that should be large."""
    return Figure(name=name, value=value, unit=unit, target=f">= {limit:g}", met=value >= limit)


def bound(name: str, value: float, unit: str) -> Figure:
    """What the line above could be at best on this machine."""
    return Figure(name=name, value=value, unit=unit, target="-", met=None)


Work = Callable[[int], object]
"""Takes the number of the turn."""


def median_s(*works: Work) -> list[float]:
    """Median processor time of each work, done in turns; the first turn does not count."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(TURNS + 1):
        for number, work in enumerate(works):
            # a different turn's keys for each work, or one would find the other's in the caches
            mine = turn + number * (TURNS + 1)
            began = time.thread_time()
            work(mine)
            times[number].append(time.thread_time() - began)
    return [float(np.median(t[1:])) for t in times]


# -- a full table and the keys of each turn ----------------------------------------------------------------------------


class Full:
    """A table of `rows` rows with random keys, and sets of 50,000 (or a fifth) of them."""

    def __init__(self, rows: int, rule: Rule | None = None) -> None:
        rng = np.random.default_rng(0)
        self.rows = rows
        self.table = Table(TableSpec("t", DIM, (rule or eg.Adagrad()).spec(), zeros()), 0, slots_owned(0, 1))
        keys = rng.integers(-(2**63), 2**63, rows, np.int64)
        size = min(KEYS, rows // 5)
        for part in np.array_split(keys, max(rows // KEYS, 1)):
            self.table.update([(part, np.zeros((part.size, DIM), np.float32), 1)], 1, 0.0)
        self._keys = [keys[rng.choice(rows, size, replace=False)] for _ in range(2 * TURNS)]
        self._numbers = [index.find(self.table._index, keys) for keys in self._keys]
        self.grads = rng.standard_normal((size, DIM), dtype=np.float32)

    def keys(self, turn: int) -> np.ndarray:
        """The keys of a turn."""
        return self._keys[turn % len(self._keys)]

    def numbers(self, turn: int) -> np.ndarray:
        """Where they lie."""
        return self._numbers[turn % len(self._numbers)]

    def pull(self, turn: int) -> np.ndarray:
        """What is measured."""
        return self.table.pull(self.keys(turn), False)

    def copy(self, turn: int) -> None:
        """The same rows, their places known: the prefetched copy that a pull ends with."""
        rows = self.numbers(turn)
        out = np.empty((rows.size, DIM), np.float32)
        gather.copy_rows(self.table._rows.array, self.table._stride, rows, out)

    def push(self, turn: int) -> None:
        """One update of the rows of a turn."""
        self.table.update([(self.keys(turn), self.grads, 1)], 1, 0.01)

    def apply(self, turn: int) -> None:
        """The rule alone, on rows whose places are known."""
        rule = self.table._spec.rule
        apply_rows(rule, self.table._rows.array, self.numbers(turn), self.grads, 0.01, 1)


def pull_against_copy(full: Full) -> Figure:
    """A pull of random rows against a copy of the same from known places."""
    ours, copy = median_s(full.pull, full.copy)
    return at_most("pull / prefetched copy of the same rows", ours / copy, "x", 2.0)


def pull_against_index_select(full: Full) -> Iterator[Figure]:
    """A pull against `torch.index_select`, which is told the places, of rows without state between them.

    The second figure is what the first could be at best on this machine: the bare copy in place of the pull.
    """
    weight = torch.zeros(full.rows, DIM)
    weight.fill_(1.0)  # touched, or all of it would be one page of zeros
    ours, copy, plain = median_s(
        full.pull, full.copy, lambda turn: torch.index_select(weight, 0, torch.from_numpy(full.numbers(turn)))
    )
    yield at_least("torch.index_select / pull", plain / ours, "x", 3.0)
    yield bound("torch.index_select / prefetched copy (bound of the above)", plain / copy, "x")


def push_against_torch(full: Full) -> Iterator[Figure]:
    """An Adagrad push against `torch.optim.Adagrad` with a sparse gradient of the same rows."""
    weight = nn.Parameter(torch.zeros(full.rows, DIM))
    optimizer = torch.optim.Adagrad([weight], lr=0.01)
    grads = torch.from_numpy(full.grads)

    def plain(turn: int) -> None:
        ids = torch.from_numpy(full.numbers(turn))[None]
        weight.grad = torch.sparse_coo_tensor(ids, grads, weight.shape)
        optimizer.step()

    ours, kernel, theirs = median_s(full.push, full.apply, plain)
    yield at_least("torch.optim.Adagrad / Adagrad push", theirs / ours, "x", 25.0)
    yield bound("torch.optim.Adagrad / Adagrad kernel (bound of the above)", theirs / kernel, "x")


# -- inserting ---------------------------------------------------------------------------------------------------------


def inserts(rows: int) -> Iterator[Figure]:
    """Making `rows` rows in batches of 50,000, and what they take.

    In memory that is new to the process, and in memory that is at hand: the first time that a virtual machine touches
    memory its host has to find some, which can take many times as long as all the rest.
    """
    table, times = _inserted(rows, 0)
    slowest, median = max(times), float(np.median(times))
    yield at_most("insert: slowest / median batch of 50,000", slowest / median, "x", 10.0)
    yield at_most("insert: slowest batch of 50,000", slowest * 1e3, "ms", 50.0)
    used = table.memory()
    yield at_most("memory beyond rows", used.beyond / len(table), "bytes a row", 40.0)
    del table
    _, times = _inserted(rows, used.rows + used.beyond)
    yield at_most("insert, memory at hand: slowest / median", max(times) / float(np.median(times)), "x", 10.0)
    yield at_most("insert, memory at hand: slowest batch", max(times) * 1e3, "ms", 50.0)


def _inserted(rows: int, at_hand_bytes: int) -> tuple[Table, list[float]]:
    """A table with so many rows, the first bytes of whose memory were touched before, and seconds of each batch."""
    table = Table(TableSpec("t", DIM, eg.Adagrad().spec(), zeros()), 0, slots_owned(0, 1))
    for arena in (table._rows, table._entries) if at_hand_bytes else ():
        arena.reserve(at_hand_bytes // arena.array.itemsize)
        arena.array[: at_hand_bytes // arena.array.itemsize : PAGE_BYTES // arena.array.itemsize] = 0
    grads = np.zeros((KEYS, DIM), np.float32)
    rng = np.random.default_rng(0)
    times = []
    for _ in range(rows // KEYS):
        keys = rng.integers(-(2**63), 2**63, KEYS, np.int64)
        began = time.thread_time()
        table.update([(keys, grads, 1)], 1, 0.01)
        times.append(time.thread_time() - began)
    return table, times


def tables(rows: int = ROWS, to_insert: int = INSERTS) -> Iterator[Figure]:
    """All figures of a table."""
    torch.set_num_threads(1)
    full = Full(rows)
    yield pull_against_copy(full)
    yield from pull_against_index_select(full)
    yield from push_against_torch(full)
    del full
    yield from inserts(to_insert)


def main() -> int:
    """Show all figures, a line each."""
    parser = argparse.ArgumentParser(description="Measure a table.")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the table pulled from and pushed to")
    parser.add_argument("--inserts", type=int, default=INSERTS, help="rows to insert")
    options = parser.parse_args()
    warm()
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, or the first update of torch's warns
    for figure in tables(options.rows, options.inserts):
        print(json.dumps(figure), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
