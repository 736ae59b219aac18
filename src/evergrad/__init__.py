"""Evergrad: a fault-tolerant, elastic parameter server for PyTorch.

    import evergrad as eg

The public names are those in `__all__`. They are imported when first used, so that the servers, which need no torch,
start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evergrad import data, errors, init_rows, metrics
    from evergrad.checkpoint.plan import Checkpoints
    from evergrad.ids import hash_ids
    from evergrad.job import Job, init
    from evergrad.nn import Embedding, EmbeddingBag
    from evergrad.optim import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
    from evergrad.serving import load_model
    from evergrad.update import Async, LocalSGD, Sync

_HOME = {
    "init": "job", "Job": "job", "Embedding": "nn", "EmbeddingBag": "nn", "load_model": "serving", "hash_ids": "ids",
    "SGD": "optim", "Adagrad": "optim", "RowWiseAdagrad": "optim", "Adam": "optim", "AdamW": "optim", "FTRL": "optim",
    "Sync": "update", "Async": "update", "LocalSGD": "update", "Checkpoints": "checkpoint.plan",
}  # fmt: skip
_MODULES = ("data", "errors", "init_rows", "metrics")

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Async",
    "Checkpoints",
    "Embedding",
    "EmbeddingBag",
    "Job",
    "LocalSGD",
    "RowWiseAdagrad",
    "Sync",
    "data",
    "errors",
    "hash_ids",
    "init",
    "init_rows",
    "load_model",
    "metrics",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"evergrad.{name}")
    if name in _HOME:
        return getattr(import_module(f"evergrad.{_HOME[name]}"), name)
    raise AttributeError(f"module 'evergrad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
