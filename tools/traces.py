"""How often each sample was trained, read from the model that `count.py` leaves behind."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

TASKS_A_STEP = 4
"""Of the script's `Sync`: a sample's gradient counts as much less."""


def updates(rule: str, samples: int, batch_size: int) -> int:
    """How many updates an epoch has: steps, or batches."""
    return -(-samples // (TASKS_A_STEP if rule == "sync" else 1) // batch_size)


def miscounted(model: Path, rule: str, samples: int, epochs: int, batch_size: int) -> str:
    """What was not applied exactly once an epoch, in words; empty if everything was."""
    table = load_file(model / "tables" / "trace.safetensors")
    missing = set(range(samples)) ^ set(table["keys"].tolist())
    times = -table["values"] * (TASKS_A_STEP if rule == "sync" else 1)
    wrong = {int(key): row.tolist() for key, row in zip(table["keys"], times, strict=True) if (row != 1).any()}
    applied = (-load_file(model / "dense.safetensors")["applied"]).tolist()
    expected = np.full(len(applied), epochs * updates(rule, samples, batch_size)).tolist()
    found = {
        "samples without a row": sorted(missing),
        "how often samples were applied, by epoch": wrong,
        f"updates of dense parameters, not {expected[0]}": applied if applied != expected else [],
    }
    return "; ".join(f"{what}: {which!r:.300}" for what, which in found.items() if which)
