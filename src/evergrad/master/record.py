"""The record: the few facts that the next master must know, written before the first message that follows from them."""

import msgspec

from evergrad.errors import CheckpointError
from evergrad.master.checkpoints import Durable
from evergrad.messages import (
    CheckpointSpec,
    EvaluationDone,
    Generation,
    Progress,
    PserverAt,
    SavingDone,
    Schema,
    SetAside,
    Source,
    Term,
    documents,
)


class Found(msgspec.Struct, frozen=True):
    """What was found. `source` None: nothing to begin with."""

    durable: tuple[Durable, ...] = ()
    """Of the job's own place, oldest first."""
    next_serial: int = 0
    source: Source | None = None
    schema: Schema | None = None
    progress: Progress = Progress()
    evaluations: tuple[EvaluationDone, ...] = ()
    savings: tuple[SavingDone, ...] = ()
    reported: dict[int, dict[str, float]] = {}
    failure: str | None = None
    lineage: str | None = None
    """Of what is gone on with."""
    damaged: tuple[str, ...] = ()
    """Newer ones that cannot be used, and why."""


class Record(msgspec.Struct, frozen=True):
    """What a master has decided.

    `progress` is of the epoch begun last, with the version at which it was left, if it was; how far it is the pservers
    know.
    """

    job: str
    term: Term
    generation: Generation = Generation(0)
    schema: Schema | None = None
    spec: CheckpointSpec | None = None
    found: Found | None = None
    """What there was at the start of the job."""
    source: Source | None = None
    """What the generation was restored from."""
    fell_behind: Generation = Generation(0)
    """The last generation that began behind where scripts were."""
    pservers: tuple[PserverAt, ...] = ()
    names: tuple[tuple[str, int], ...] = ()
    """Name and pid of each."""
    next_serial: int = 0
    durable: tuple[Durable, ...] = ()
    putting: int | None = None
    """The serial whose manifest is being put."""
    progress: Progress = Progress()
    passed: int = -1
    """The last epoch whose batches scripts are past."""
    epochs: int = 0
    outside: tuple[int, ...] = ()
    """The places outside of the loops over epochs, as evaluations and savings name them."""
    evaluations: tuple[EvaluationDone, ...] = ()
    savings: tuple[SavingDone, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    dropped: int = 0
    reported: dict[int, dict[str, float]] = {}
    ended: bool = False
    failure: str | None = None


def encode(record: Record) -> bytes:
    """The record as JSON."""
    return documents.encode(record)


def decode(data: bytes) -> Record:
    """The record in this JSON.

    Raises:
        CheckpointError: there is none in it.
    """
    try:
        return documents.decode(data, Record)
    except msgspec.MsgspecError as exc:
        raise CheckpointError(f"the job's record cannot be read: {exc}; start the job anew") from exc
