"""What a script gives to a job, checked, with a sentence for what does not do."""

import os
import sys
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

from evergrad.checks import whole_number
from evergrad.data.dataset import Dataset, as_dataset
from evergrad.errors import ConfigError
from evergrad.messages import DataSpec, Partial
from evergrad.metrics import merge, partial


def seed_of(value: object) -> int:
    """A job's seed: a whole number of at most 63 bits, also as text."""
    try:
        seed = int(value) if isinstance(value, str) else index(value)  # type: ignore[arg-type]  # index() checks it
    except (TypeError, ValueError):
        raise ConfigError(f"seed is {value!r}; give a whole number") from None
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed is {seed}; give one of at most 63 bits")
    return seed


def folder_of(path: object) -> Path:
    """Where a model is to be saved: a folder of this machine, as an absolute path."""
    if not isinstance(path, str | os.PathLike) or "://" in str(path) or "\0" in str(path):
        raise ConfigError(f"save_model writes to a folder of this machine, not to {path!r}; give a path")
    return Path(path).expanduser().absolute()


def data_of(dataset: object, batch_size: int, shuffle: bool) -> tuple[Dataset, DataSpec]:
    """A dataset, and what the master is told of it."""
    batch_size = whole_number("batch_size", batch_size, least=1)
    data = as_dataset(dataset)
    fingerprint = f"{data.fingerprint()} {'shuffled' if shuffle else 'in order'}"
    return data, DataSpec(len(data), fingerprint, batch_size)


def partials(found: object) -> dict[str, Partial]:
    """What the function given to `evaluate` has returned, as parts that add up."""
    if not isinstance(found, Mapping):
        raise ConfigError(f"evaluate: the function returned a {type(found).__name__}; return a dict of metrics by name")
    return {str(name): partial(value) for name, value in found.items()}


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What is reported, as numbers by name."""
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError, AttributeError):
        raise ConfigError(
            f"job.report wants numbers by name, as {{'loss': loss.item()}}, not {metrics!r:.200}"
        ) from None


def added(metrics: dict[str, Partial], more: dict[str, Partial]) -> dict[str, Partial]:
    """Metrics of two batches together."""
    return metrics | {name: merge(metrics[name], m) if name in metrics else m for name, m in more.items()}


def frames_to_the_script() -> int:
    """The stack level of the nearest caller outside this package and torch: where a warning belongs."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("evergrad", "torch"):
        level, frame = level + 1, frame.f_back
    return level + 1
