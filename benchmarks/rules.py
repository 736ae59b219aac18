"""What every update rule costs beside Adagrad: `python benchmarks/rules.py`.

A push of random rows into an arena that has them all, a rule and Adagrad in turn; the fastest round of each counts. The
time of a rule over Adagrad's is divided by what it moves over what Adagrad moves: the cache lines that the rows pushed
touch, and those of their gradients.
"""

import argparse
import json
import sys
import time

import numpy as np

import evergrad as eg
from evergrad.optim import Rule
from evergrad.pserver.arena import Arena
from evergrad.pserver.rules import apply_rows

TARGET = 1.3
LINE_BYTES = 64
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
    """Each rule's time over Adagrad's, its bytes allowed for.

    Args:
        total: rows of the table.
        pushed: rows of a push.
        dim: length of a row.
        rounds: pairs of pushes.
    """
    rng = np.random.default_rng(0)
    pushes = [rng.choice(total, pushed, replace=False) for _ in range(rounds)]
    grads = rng.standard_normal((pushed, dim), dtype=np.float32)
    adagrad = Pushes(eg.Adagrad(), total, dim, grads)
    lines: list[dict[str, object]] = []
    for name, rule in RULES.items():
        other = Pushes(rule, total, dim, grads)
        pairs = [(other.seconds(rows), adagrad.seconds(rows)) for rows in pushes]
        fastest, of_adagrad = (min(times) for times in zip(*pairs, strict=True))
        moved = other.lines(pushes[0]) / adagrad.lines(pushes[0])
        value = fastest / of_adagrad / moved
        lines.append({
            "name": f"{name}: push of {pushed:,} rows x {dim} / Adagrad's, bytes allowed for",
            "value": value, "unit": "ratio", "target": f"<= {TARGET}", "met": value <= TARGET,
            "time_ratio": fastest / of_adagrad, "bytes_ratio": moved,
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
        self._width_bytes = 4 * width

    def seconds(self, rows: np.ndarray) -> float:
        """Push to these rows."""
        self._updates += 1
        began = time.perf_counter()
        apply_rows(self._spec, self._arena, rows, self._grads, 0.01, self._updates)
        return time.perf_counter() - began

    def lines(self, rows: np.ndarray) -> float:
        """Cache lines that these rows and their gradients touch."""
        begin = self._arena.ctypes.data + rows * self._width_bytes
        of_rows = (begin + self._width_bytes - 1) // LINE_BYTES - begin // LINE_BYTES + 1
        return float(of_rows.sum()) + self._grads.nbytes / LINE_BYTES


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
        parts = f"time {line['time_ratio']:.2f} bytes {line['bytes_ratio']:.2f}"
        print(f"{line['value']:6.2f} {met:8} {parts}  {line['name']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
