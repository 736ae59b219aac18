"""What every update rule costs beside Adagrad: `python benchmarks/rules.py`.

A push of random rows into an arena that has them all, a rule and Adagrad in turn, so that neither finds anything of its
own arena in a cache; the median of each counts, and of three pairs of arenas the one in the middle: how fast memory is
depends on where in the machine it lies. The time of a rule over Adagrad's is divided by the cache lines it
moves over those that Adagrad moves: each line of a row is read and written, each line of a gradient read. A row of dim
32 with one float of state lies in three lines, one of Adagrad's in four.
"""

import argparse
import json
import sys
import time

import numpy as np

import evergrad as eg
from evergrad.kernels.lanes import WIDTH
from evergrad.optim import Rule
from evergrad.pserver.arena import Arena
from evergrad.pserver.rules import apply_rows

TARGET = 1.3
PAIRS = 3
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


def measure(total: int = 1_000_000, pushed: int = 50_000, dim: int = 32, rounds: int = 40) -> list[dict[str, object]]:
    """Each rule's time over Adagrad's, its lines allowed for.

    Args:
        total: rows of the table.
        pushed: rows of a push.
        dim: length of a row.
        rounds: turns.
    """
    rng = np.random.default_rng(0)
    pushes = [rng.choice(total, pushed, replace=False) for _ in range(rounds)]
    grads = rng.standard_normal((pushed, dim), dtype=np.float32)
    adagrads = [Pushes(eg.Adagrad(), total, dim, grads) for _ in range(PAIRS)]
    lines: list[dict[str, object]] = []
    for name, rule in RULES.items():
        others = [Pushes(rule, total, dim, grads) for _ in range(PAIRS)]
        time_ratio = float(np.median([_ratio(*pair, pushes) for pair in zip(others, adagrads, strict=True)]))
        moved = others[0].lines() / adagrads[0].lines()
        value = time_ratio / moved
        lines.append({
            "name": f"{name}: push of {pushed:,} rows x {dim} / Adagrad's, bytes allowed for",
            "value": value, "unit": "ratio", "target": f"<= {TARGET}", "met": value <= TARGET,
            "time_ratio": time_ratio, "lines_ratio": moved,
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
        self._width, self._dim = width, dim

    def push_s(self, rows: np.ndarray) -> float:
        """Push to these rows; returns how long it took."""
        self._updates += 1
        began = time.perf_counter()
        apply_rows(self._spec, self._arena, rows, self._grads, 0.01, self._updates)
        return time.perf_counter() - began

    def lines(self) -> float:
        """Cache lines moved for a row, on average."""
        begins = np.arange(WIDTH) * self._width % WIDTH
        return 2 * float(np.mean(-(-(begins + self._width) // WIDTH))) + self._dim / WIDTH


def _ratio(of_rule: Pushes, of_adagrad: Pushes, pushes: list[np.ndarray]) -> float:
    times = [(of_rule.push_s(rows), of_adagrad.push_s(rows)) for rows in pushes]
    a, b = np.median(times, axis=0).tolist()
    return float(a / b)


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
        parts = f"time {line['time_ratio']:.2f} lines {line['lines_ratio']:.2f}"
        print(f"{line['value']:6.2f} {met:8} {parts}  {line['name']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
