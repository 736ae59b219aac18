"""The record: the few facts that the next master must know, written before the first message that follows from them."""

from typing import Any

import msgspec
import numpy as np

from evergrad.errors import CheckpointError
from evergrad.master.checkpoints import Durable
from evergrad.messages import (
    CheckpointSpec,
    DataSpec,
    Generation,
    Partial,
    Progress,
    PserverAt,
    Schema,
    SetAside,
    Source,
    Term,
)


class Found(msgspec.Struct, frozen=True):
    """What was found. `source` None: nothing to begin with."""

    durable: tuple[Durable, ...] = ()
    """Of the job's own place, oldest first."""
    next_serial: int = 0
    source: Source | None = None
    schema: Schema | None = None
    progress: Progress = Progress()
    failure: str | None = None


class EvaluationDone(msgspec.Struct, frozen=True):
    """An evaluation that is done: its epoch, its number there, and what came of it."""

    epoch: int
    ordinal: int
    data: DataSpec
    totals: dict[str, Partial]
    failure: str | None


class SavingDone(msgspec.Struct, frozen=True):
    """A saving that is done: its epoch, its number there, and what came of it."""

    epoch: int
    ordinal: int
    path: str
    failure: str | None


class Record(msgspec.Struct, frozen=True):
    """What a master has decided. `progress` is of the epoch begun last; versions within it the pservers know."""

    job: str
    term: Term
    generation: Generation = Generation(0)
    schema: Schema | None = None
    spec: CheckpointSpec | None = None
    found: Found | None = None
    """What there was at the start of the job."""
    source: Source | None = None
    """What the generation was restored from."""
    pservers: tuple[PserverAt, ...] = ()
    names: tuple[tuple[str, int], ...] = ()
    """Name and pid of each."""
    next_serial: int = 0
    durable: tuple[Durable, ...] = ()
    progress: Progress = Progress()
    passed: int = -1
    """The last epoch whose batches scripts are past."""
    epochs: int = 0
    evaluations: tuple[EvaluationDone, ...] = ()
    savings: tuple[SavingDone, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    reported: dict[int, dict[str, float]] = {}
    ended: bool = False
    failure: str | None = None


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return msgspec.json.encode(record, enc_hook=_to_list)


def decode(data: bytes) -> Record:
    """The record in this JSON.

    Raises:
        CheckpointError: there is none in it.
    """
    try:
        return msgspec.json.decode(data, type=Record, dec_hook=_to_array)
    except msgspec.MsgspecError as exc:
        raise CheckpointError(f"the job's record cannot be read: {exc}; start the job anew") from exc


def _to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"shape": value.shape, "values": value.reshape(-1).tolist()}
    raise NotImplementedError


def _to_array(kind: type, value: Any) -> Any:
    return np.array(value["values"], np.float64).reshape(value["shape"])
