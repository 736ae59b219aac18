"""What every update rule costs beside Adagrad: `python benchmarks/rules.py`.

A push of random rows into an arena that has them all, a rule and Adagrad in turn; the fastest round of each counts. The
time of a rule over Adagrad's is divided by what moving its rows takes over what moving Adagrad's takes, in the same
turns: reading and writing each line of them and reading the gradients, with the same prefetching. Lines counted instead
would not do: two that lie together, as a row of Adagrad's of dim 16 does, come for little more than one.
"""

import argparse
import json
import sys
import time

import numpy as np

import evergrad as eg
from evergrad.kernels.arrays import Floats, Rows
from evergrad.kernels.jit import f32, i64, inline, kernel, reads, void, writes
from evergrad.kernels.lanes import GRADS, Count, Wired, load, over, store
from evergrad.kernels.rules import prefetch_ahead
from evergrad.optim import Rule
from evergrad.pserver.arena import Arena
from evergrad.pserver.rules import apply_rows

TARGET = 1.3
RULES: dict[str, Rule] = {
    "SGD": eg.SGD(),
    "SGD, weight decay": eg.SGD(weight_decay=1e-4),
    "SGD, momentum": eg.SGD(momentum=0.9),
    "SGD, dampened momentum": eg.SGD(momentum=0.9, dampening=0.1),
    "SGD, nesterov, weight decay": eg.SGD(momentum=0.9, nesterov=True, weight_decay=1e-4),
    "Adagrad, weight decay": eg.Adagrad(weight_decay=1e-4),
    "RowWiseAdagrad": eg.RowWiseAdagrad(),
    "RowWiseAdagrad, weight decay": eg.RowWiseAdagrad(weight_decay=1e-4),
    "Adam": eg.Adam(),
    "Adam, weight decay": eg.Adam(weight_decay=1e-4),
    "AdamW": eg.AdamW(),
    "FTRL": eg.FTRL(l1=0.01, l2=0.01),
}


@inline
def _move_line(at: int, count: Count, arena: Floats, start: int, grads: Wired, grad_start: int, dim: int) -> None:
    store(arena, start + at, count, load(arena, start + at, count) + load(grads, grad_start + at % dim, None))


@kernel(void, writes(f32), i64, reads(i64), GRADS)
def move(arena: Floats, stride: int, rows: Rows, grads: Wired) -> None:
    """Read and write rows, adding something of their gradients."""
    n, dim = grads.shape
    flat = grads.reshape(-1)
    for i in range(n):
        prefetch_ahead(arena, rows, i, stride)
        over(_move_line, stride, (arena, rows[i] * stride, flat, min(i, n - 2) * dim, dim))


def measure(total: int = 1_000_000, pushed: int = 50_000, dim: int = 32, rounds: int = 40) -> list[dict[str, object]]:
    """Each rule's time over Adagrad's, its bytes allowed for.

    Args:
        total: rows of the table.
        pushed: rows of a push.
        dim: length of a row.
        rounds: turns.
    """
    rng = np.random.default_rng(0)
    pushes = [rng.choice(total, pushed, replace=False) for _ in range(rounds)]
    grads = rng.standard_normal((pushed, dim), dtype=np.float32)
    adagrad = Pushes(eg.Adagrad(), total, dim, grads)
    lines: list[dict[str, object]] = []
    for name, rule in RULES.items():
        other = Pushes(rule, total, dim, grads)
        turns = [(p.push_s(rows), p.move_s(rows)) for rows in pushes for p in (other, adagrad)]
        of_rule, moved, of_adagrad, moved_adagrad = (min(t) for n in (0, 1) for t in zip(*turns[n::2], strict=True))
        value = of_rule / of_adagrad / (moved / moved_adagrad)
        lines.append({
            "name": f"{name}: push of {pushed:,} rows x {dim} / Adagrad's, bytes allowed for",
            "value": value, "unit": "ratio", "target": f"<= {TARGET}", "met": value <= TARGET,
            "time_ratio": of_rule / of_adagrad, "moving_ratio": moved / moved_adagrad,
        })  # fmt: skip
    return lines


class Pushes:
    """The rows of one rule, one after the other in an arena as in a table."""

    def __init__(self, rule: Rule, total: int, dim: int, grads: np.ndarray) -> None:
        self._spec = rule.spec()
        width = self._spec.row_width(dim)
        self._memory: Arena[np.float32] = Arena(np.float32)
        self._memory.reserve(total * width)
        self._arena = self._memory.array[: total * width]
        self._arena[:] = self._spec.initial_state
        self._arena.reshape(total, width)[:, :dim] = 0.1
        self._grads = grads
        self._updates = 0
        self._width = width

    def push_s(self, rows: np.ndarray) -> float:
        """Push to these rows; returns how long it took."""
        self._updates += 1
        began = time.perf_counter()
        apply_rows(self._spec, self._arena, rows, self._grads, 0.01, self._updates)
        return time.perf_counter() - began

    def move_s(self, rows: np.ndarray) -> float:
        """How long it takes to read and write others of the same size."""
        elsewhere = self._arena.size // self._width - 1 - rows
        began = time.perf_counter()
        move(self._arena, self._width, elsewhere, self._grads)
        return time.perf_counter() - began


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the update rules against Adagrad.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines = measure(total=options.rows, dim=options.dim)
    if options.json:
        print(json.dumps(lines, indent=2))
        return 0
    for line in lines:
        met = "met" if line["met"] else "NOT MET"
        parts = f"time {line['time_ratio']:.2f} moving {line['moving_ratio']:.2f}"
        print(f"{line['value']:6.2f} {met:8} {parts}  {line['name']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
