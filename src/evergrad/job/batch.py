"""The batch a script is at, and one that was read for it."""

import hashlib
import random
from typing import Any, NamedTuple

import numpy as np
import torch

from evergrad.job.bound import Requested
from evergrad.job.rows import BatchRows
from evergrad.messages import AsyncTask, Partial, SyncTask, TableKeys


class Read(NamedTuple):
    """A batch that was read, the rows it needs, and its seed (of reading; the next is that of computing)."""

    batch: Any
    rows: BatchRows
    seed: int
    samples: int


class Fetched(NamedTuple):
    """A batch that was read, and what was asked for it."""

    read: Read
    requested: Requested


class OpenBatch:
    """The batch the script is at."""

    def __init__(self, task: SyncTask | AsyncTask, step: int, samples: int, number: int = 0) -> None:
        self.task, self.step, self.samples, self.number = task, step, samples, number
        self.has_stepped = self.contributed = self.is_void = False
        self.metrics: dict[str, Partial] = {}
        self.evict: list[TableKeys] = []


def mixed_seed(*parts: object) -> int:
    """A seed made of the job's and of what it is for, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def seed_generators(seed: int) -> None:
    """Start the random generators of Python, numpy and torch anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond for devices that are not there
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
