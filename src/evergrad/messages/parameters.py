"""Parameters: what the master tells the pservers, and what trainers pull and push."""

from enum import StrEnum

import msgspec

from evergrad.messages.model import OneOrMore, Schema, Source
from evergrad.messages.types import (
    AnyArray,
    Attempt,
    Flags,
    Generation,
    Keys,
    Member,
    Message,
    Place,
    Request,
    Term,
)


class Restore(Message, frozen=True):
    """Hold this model from now on, as the pserver of `place` of `places`; `source` None: from nothing.

    `checkpoints`: the URL to write parts of checkpoints to.
    """

    term: Term
    generation: Generation
    member: Member
    place: Place
    places: int
    schema: Schema
    source: Source | None
    checkpoints: str | None = None


class Obstacle(StrEnum):
    """Why a checkpoint could not be restored."""

    DAMAGED = "damaged"
    """It cannot be read or does not fit; another one may."""
    AWAY = "away"
    """The storage cannot be read now; it may be later."""
    HERE = "here"
    """This process lacks something, for any checkpoint."""


class Restored(Message, frozen=True):
    """A pserver holds a generation's model at `version`, or cannot (`failure`, with its `obstacle`).

    `rows` of each table here, in the schema's order; `bytes_read` of files, in `seconds`.
    """

    term: Term
    generation: Generation
    place: Place
    member: Member
    version: int
    rows: tuple[int, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0
    failure: str | None = None
    obstacle: Obstacle = Obstacle.DAMAGED


class Commit(Message, frozen=True):
    """Apply the pushes of `step` that `chosen` lists as (task, attempt), in task order, then cut `serial`, if any."""

    term: Term
    generation: Generation
    step: int
    chosen: tuple[tuple[int, Attempt], ...]
    serial: int | None


class Committed(Message, frozen=True):
    """The step is applied (now or before)."""

    term: Term
    generation: Generation
    place: Place
    step: int


class Missing(Message, frozen=True):
    """The commit names a push this pserver does not hold; nothing was applied."""

    term: Term
    generation: Generation
    place: Place
    step: int


class CloseEpoch(Message, frozen=True):
    """Under `Async` an epoch is over: apply none of its batches any more."""

    term: Term
    generation: Generation
    epoch: int


class EpochClosed(Message, frozen=True):
    """No batch of this epoch is applied any more."""

    term: Term
    generation: Generation
    place: Place
    epoch: int


class Deposed(Message, frozen=True):
    """A master of a higher term exists."""

    term: Term


class Shutdown(Message, frozen=True):
    """The job is over; leave."""

    term: Term


class TableKeys(msgspec.Struct, frozen=True):
    """Keys to read from a table: shape (n,), all owned by the pserver asked, duplicates allowed."""

    table: int
    keys: Keys


class GroupSpan(msgspec.Struct, frozen=True):
    """Elements [start, stop) of the pserver's own span of a dense group."""

    group: int
    start: int
    stop: int


class Pull(Message, frozen=True):
    """Read rows and dense groups at exactly `version`, or at whatever there is (`NEWEST`). Changes nothing."""

    request: Request
    generation: Generation
    version: int
    evaluating: bool
    tables: tuple[TableKeys, ...]
    groups: tuple[GroupSpan, ...]


class Pulled(Message, frozen=True):
    """Rows, shape (n, dim) for each table asked, as the job's wire has them, and the elements asked of groups."""

    request: Request
    version: int
    rows: tuple[AnyArray, ...]
    groups: tuple[AnyArray, ...]


class Stale(Message, frozen=True):
    """The generation or step of the request has passed: what it belongs to counts no more."""

    request: Request
    generation: Generation
    version: int


class TableGrads(msgspec.Struct, frozen=True):
    """Gradients of a table's rows: one row (n, dim) for each of the n different keys this pserver owns.

    Their type is that of the job's wire: float32, or the 16 bits of a shorter type as uint16. A table that a task
    touched is named to every pserver, with no keys where it owns none of them, so that all count the same number of
    updates.
    """

    table: int
    lr: float
    keys: Keys
    grads: AnyArray


class GroupGrads(msgspec.Struct, frozen=True):
    """Gradients or new buffer values, from element `start` of this pserver's span of the group.

    `present[i]`: parameter i has one.
    """

    group: int
    lr: float
    values: AnyArray
    present: Flags
    start: int = 0


class Push(Message, frozen=True):
    """What one attempt of one task of a step contributes, or one of several parts; held until the step's commit.

    `evict` names rows to delete before the update, whoever owns them; it comes with the first part.
    """

    request: Request
    generation: Generation
    step: int
    task: int
    attempt: Attempt
    samples: int
    tables: tuple[TableGrads, ...]
    groups: tuple[GroupGrads, ...]
    evict: tuple[TableKeys, ...] = ()
    part: int = 0
    parts: int = 1


class PushBatch(Message, frozen=True):
    """What `batches` batches of an asynchronous task, from `batch` on, contribute together.

    Applied when that one is the task's next and all parts are here.
    """

    request: Request
    generation: Generation
    epoch: int
    task: int
    batch: int
    tables: tuple[TableGrads, ...]
    groups: tuple[GroupGrads, ...]
    evict: tuple[TableKeys, ...] = ()
    part: int = 0
    parts: int = 1
    batches: OneOrMore = 1


class Pushed(Message, frozen=True):
    """The push is held (`Push`), or has been applied, now or before (`PushBatch`)."""

    request: Request


class Full(Message, frozen=True):
    """The push is refused since the pserver has no memory for it; `reason` says what to do."""

    request: Request
    reason: str


class Where(Message, frozen=True):
    """How many batches of an asynchronous task have you applied?"""

    request: Request
    generation: Generation
    epoch: int
    task: int


class Here(Message, frozen=True):
    """So many batches of that task."""

    request: Request
    batches: int


class ExportPart(StrEnum):
    """What of a table to export."""

    KEYS = "keys"
    VALUES = "values"


class Export(Message, frozen=True):
    """Read a table's keys or values sorted by (slot, key), from the `slot`-th slot on, about `limit` bytes of them."""

    request: Request
    generation: Generation
    version: int
    table: int
    part: ExportPart
    slot: int
    limit: int


class Exported(Message, frozen=True):
    """The next piece of a table, and the slot to go on with (None: that was all)."""

    request: Request
    part: AnyArray
    next_slot: int | None


class CountRows(Message, frozen=True):
    """How many rows has each table here?"""

    request: Request
    generation: Generation
    version: int


class RowCounts(Message, frozen=True):
    """Rows of each table, in the schema's order."""

    request: Request
    counts: tuple[int, ...]
