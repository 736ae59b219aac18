"""All that crosses a process boundary.

A message is a msgspec struct; its arrays travel as raw buffers beside it (`wire/codec.py`). Requests carry an id that
is the same in every resending of the request and comes back in its answer. Messages about the model carry the
generation, messages of a master its term; see `docs/architecture.md` for who sends what to whom and when.
"""

from enum import StrEnum
from typing import Any, NamedTuple, NewType

import msgspec
import numpy as np
from numpy.typing import NDArray

from evergrad.init_rows import Initializer
from evergrad.optim import RuleSpec

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
Flags = NDArray[np.uint8]
Numbers = NDArray[np.float64]
AnyArray = NDArray[Any]

Member = NewType("Member", str)
"""The incarnation of a process: new at each start, and its identity on the wire."""
Address = NewType("Address", str)
Place = NewType("Place", int)
Term = NewType("Term", int)
Generation = NewType("Generation", int)
Request = NewType("Request", int)

NEWEST = -1
"""As the version of a pull: whatever version the pserver has."""
INIT_STEP = -1
"""The step whose one task hands in the initial dense values; its commit makes version 0."""


class Attempt(NamedTuple):
    """One handing-out of a task; no two masters number alike."""

    term: int
    counter: int


class Role(StrEnum):
    """The three roles, and the process that starts them."""

    MASTER = "master"
    PSERVER = "pserver"
    TRAINER = "trainer"
    LAUNCHER = "launcher"


class Message(msgspec.Struct, frozen=True, tag=True):
    """The base of everything sent."""


class Send(NamedTuple):
    """What a role wants sent: `to` is the member that asked, or the address of a process to ask."""

    to: str
    message: Message


# -- the model, as all roles know it -----------------------------------------------------------------------------------


class TableSpec(msgspec.Struct, frozen=True):
    """One embedding table. `unseen_zero`: in evaluation a key without a row reads zeros, not its initial value."""

    name: str
    dim: int
    rule: RuleSpec
    initializer: Initializer
    unseen_zero: bool = True


class GroupKind(StrEnum):
    """What a dense group's values are, and so what a push of it means."""

    TRAINED = "trained"
    """float32 parameters with a rule; a push holds gradients."""
    FROZEN = "frozen"
    """float32 parameters without gradient; set by the initial step only."""
    AVERAGED = "averaged"
    """float32 buffers; a push holds new values, the step keeps their mean over samples."""
    LOWEST = "lowest"
    """int64 buffers; a push holds new values, the step keeps those of its lowest task."""


class ParameterSpec(msgspec.Struct, frozen=True):
    """A parameter or buffer inside a dense group; `dtype` is torch's name of its type in the model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        size = 1
        for n in self.shape:
            size *= n
        return size


class GroupSpec(msgspec.Struct, frozen=True):
    """Dense parameters or buffers kept as one flat array, in the order listed; `rule` for TRAINED only."""

    kind: GroupKind
    rule: RuleSpec | None
    parameters: tuple[ParameterSpec, ...]

    @property
    def size(self) -> int:
        """Number of elements of the flat array."""
        return sum(p.size for p in self.parameters)


class UpdateName(StrEnum):
    """The update rules of a job."""

    SYNC = "sync"
    ASYNC = "async"


class UpdateSpec(msgspec.Struct, frozen=True):
    """How the pservers update: for `sync` the tasks of a step, for `async` the batches of a task."""

    name: UpdateName
    batches: int
    backup_after_s: float | None = None


class Schema(msgspec.Struct, frozen=True):
    """What all trainers of a job must agree on."""

    seed: int
    update: UpdateSpec
    tables: tuple[TableSpec, ...]
    groups: tuple[GroupSpec, ...]


class DataSpec(msgspec.Struct, frozen=True):
    """A dataset as the master knows it."""

    samples: int
    fingerprint: str
    batch_size: int


# -- members -----------------------------------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """A process asks to be a member. `name` is what people call it ("trainer-1")."""

    request: Request
    role: Role
    member: Member
    name: str
    pid: int
    numerics: str = ""
    place: Place | None = None
    address: Address | None = None


class Joined(Message, frozen=True):
    """Welcome. `lease_s`: silence after which a member counts as dead."""

    request: Request
    term: Term
    generation: Generation
    lease_s: float


class Refused(Message, frozen=True):
    """The answer to a request that cannot be granted; `reason` is one sentence that says what to do."""

    request: Request
    reason: str


class Heartbeat(Message, frozen=True):
    """A member lives; `idle_s` is how long ago its loop last turned."""

    request: Request
    member: Member
    idle_s: float


class HeartbeatReply(Message, frozen=True):
    """`known` is False for a member declared dead, which must join anew under a new incarnation.

    `over`: the job has ended, and failed if there is a `failure`.
    """

    request: Request
    term: Term
    generation: Generation
    known: bool
    over: bool
    failure: str | None


class Leave(Message, frozen=True):
    """A member goes for good; what it held is handed to others. `failure` is the script's traceback, if it raised."""

    request: Request
    member: Member
    failure: str | None = None


class Unknown(Message, frozen=True):
    """The asker is no member (any more): it must join anew under a new incarnation."""

    request: Request


class AskLeader(Message, frozen=True):
    """Is the asker the leader? Where there is none, it becomes it."""

    request: Request
    member: Member


class LeaderIs(Message, frozen=True):
    """Whether the asker is the leader."""

    request: Request
    leader: bool


class Left(Message, frozen=True):
    """A goodbye was noted."""

    request: Request


class Exited(Message, frozen=True):
    """The launcher saw the process called `name` (with this pid) end."""

    request: Request
    name: str
    pid: int


# -- trainer to master: what to do next --------------------------------------------------------------------------------


class Agree(Message, frozen=True):
    """A trainer names the model it trains. Answered when all pservers hold it, or with what differs."""

    request: Request
    member: Member
    schema: Schema


class PserverAt(msgspec.Struct, frozen=True):
    """Which process holds a place, and where it listens."""

    place: Place
    member: Member
    address: Address


class Agreed(Message, frozen=True):
    """The model is known; these are the pservers, by place."""

    request: Request
    term: Term
    generation: Generation
    pservers: tuple[PserverAt, ...]


class WantEpoch(msgspec.Struct, frozen=True, tag=True):
    """Position in the script: at the head of a loop over epochs up to, not including, `until`; `after` was the last."""

    after: int
    until: int


class WantBatch(msgspec.Struct, frozen=True, tag=True):
    """Position in the script: inside `batches` of an epoch."""

    epoch: int
    data: DataSpec


class WantTotals(msgspec.Struct, frozen=True, tag=True):
    """Position in the script: inside the `ordinal`-th `evaluate` of an epoch."""

    epoch: int
    ordinal: int
    data: DataSpec


class WantSaved(msgspec.Struct, frozen=True, tag=True):
    """Position in the script: inside the `ordinal`-th `save_model` of an epoch."""

    epoch: int
    ordinal: int
    path: str


class WantEnd(msgspec.Struct, frozen=True, tag=True):
    """Position in the script: past its end."""


Want = WantEpoch | WantBatch | WantTotals | WantSaved | WantEnd


class Partial(msgspec.Struct, frozen=True):
    """A metric of some samples that adds up with those of others; see `metrics.py`."""

    kind: str
    values: Numbers


class TrainDone(msgspec.Struct, frozen=True, tag=True):
    """A task was computed; `contributed` tells whether every pserver holds its push. `metrics` are for show."""

    generation: Generation
    attempt: Attempt
    contributed: bool
    metrics: dict[str, Partial]


class EvalDone(msgspec.Struct, frozen=True, tag=True):
    """An evaluation task was computed."""

    generation: Generation
    attempt: Attempt
    totals: dict[str, Partial]


class SaveDone(msgspec.Struct, frozen=True, tag=True):
    """The leader has the model saved, or could not (`failure`)."""

    generation: Generation
    attempt: Attempt
    failure: str | None = None


class BreakDone(msgspec.Struct, frozen=True, tag=True):
    """The script left the `batches` of an epoch, which ends for all; and loops over epochs up to `left_until`."""

    epoch: int
    left_until: int


Done = TrainDone | EvalDone | SaveDone | BreakDone


class Ask(Message, frozen=True):
    """A trainer says what it has done and where its script is; the answer says what to do. At most one is open."""

    request: Request
    member: Member
    want: Want
    done: Done | None


class EpochIs(Message, frozen=True):
    """The epoch the script goes on with, or None: there are no more."""

    request: Request
    epoch: int | None


class InitTask(Message, frozen=True):
    """Hand in the initial dense values: the one task of step -1."""

    request: Request
    term: Term
    generation: Generation
    attempt: Attempt


class SyncTask(Message, frozen=True):
    """One batch of step `step`: positions [start, stop) of the epoch order. `index` is its number in the step."""

    request: Request
    term: Term
    generation: Generation
    attempt: Attempt
    epoch: int
    step: int
    index: int
    start: int
    stop: int


class AsyncTask(Message, frozen=True):
    """Several batches: positions [start, stop) of the epoch order, `batch_size` at a time.

    `first` is the number, counted over all epochs, of the task's first batch: learning rates depend on it.
    """

    request: Request
    term: Term
    generation: Generation
    attempt: Attempt
    epoch: int
    task: int
    start: int
    stop: int
    first: int


class EvalTask(Message, frozen=True):
    """Samples [start, stop) of an evaluation dataset, with the parameters of `version`."""

    request: Request
    term: Term
    generation: Generation
    attempt: Attempt
    version: int
    start: int
    stop: int


class SaveTask(Message, frozen=True):
    """The asker is the leader: save the model of `version`."""

    request: Request
    term: Term
    generation: Generation
    attempt: Attempt
    version: int


class Over(Message, frozen=True):
    """What was asked for is done: the epoch's batches, or a model saved."""

    request: Request


class TotalsAre(Message, frozen=True):
    """The totals of an evaluation, the same for every trainer."""

    request: Request
    totals: dict[str, Partial]


class Ended(Message, frozen=True):
    """The job is over; `failure` says why if it failed. `request` is 0 when nobody asked."""

    request: Request
    failure: str | None


TaskMessage = InitTask | SyncTask | AsyncTask | EvalTask | SaveTask


class ReportMetrics(Message, frozen=True):
    """Metrics the script reported for an epoch; shown by the launcher."""

    request: Request
    member: Member
    epoch: int
    metrics: dict[str, float]


# -- master to pserver -------------------------------------------------------------------------------------------------


class Restore(Message, frozen=True):
    """Hold this model from now on, as the pserver of `place` of `places`; `checkpoint` None: from nothing."""

    term: Term
    generation: Generation
    member: Member
    place: Place
    places: int
    schema: Schema
    checkpoint: int | None


class Restored(Message, frozen=True):
    """A pserver holds a generation's model at `version`."""

    term: Term
    generation: Generation
    place: Place
    member: Member
    version: int


class Commit(Message, frozen=True):
    """Apply the pushes of `step` that `chosen` lists as (task, attempt), in task order."""

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


class Deposed(Message, frozen=True):
    """A master of a higher term exists."""

    term: Term


class Shutdown(Message, frozen=True):
    """The job is over; leave."""

    term: Term


# -- trainer to pserver ------------------------------------------------------------------------------------------------


class TableKeys(msgspec.Struct, frozen=True):
    """Keys to read from a table: shape (n,), all owned by the pserver asked, duplicates allowed."""

    table: int
    keys: Keys


class Pull(Message, frozen=True):
    """Read rows and dense groups at exactly `version`, or at whatever there is (`NEWEST`). Changes nothing."""

    request: Request
    generation: Generation
    version: int
    evaluating: bool
    tables: tuple[TableKeys, ...]
    groups: tuple[int, ...]


class Pulled(Message, frozen=True):
    """Rows, shape (n, dim) for each table asked, and this pserver's span of each group asked."""

    request: Request
    version: int
    rows: tuple[Floats, ...]
    groups: tuple[AnyArray, ...]


class Stale(Message, frozen=True):
    """The generation or step of the request has passed: what it belongs to counts no more."""

    request: Request
    generation: Generation
    version: int


class TableGrads(msgspec.Struct, frozen=True):
    """Gradients of a table's rows: one row (n, dim) for each of the n different keys this pserver owns.

    A table that a task touched is named to every pserver, with no keys where it owns none of them, so that all count
    the same number of updates.
    """

    table: int
    lr: float
    keys: Keys
    grads: Floats


class GroupGrads(msgspec.Struct, frozen=True):
    """This pserver's span of a group's gradients or new buffer values; `present[i]`: parameter i has one."""

    group: int
    lr: float
    values: AnyArray
    present: Flags


class Push(Message, frozen=True):
    """What one attempt of one task of a step contributes; held until the step's commit."""

    request: Request
    generation: Generation
    step: int
    task: int
    attempt: Attempt
    samples: int
    tables: tuple[TableGrads, ...]
    groups: tuple[GroupGrads, ...]


class PushBatch(Message, frozen=True):
    """What one batch of an asynchronous task contributes; applied when it is the task's next."""

    request: Request
    generation: Generation
    epoch: int
    task: int
    batch: int
    tables: tuple[TableGrads, ...]
    groups: tuple[GroupGrads, ...]


class Pushed(Message, frozen=True):
    """The push is held (`Push`), or has been applied, now or before (`PushBatch`)."""

    request: Request


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


# -- status ------------------------------------------------------------------------------------------------------------


class AskStatus(Message, frozen=True):
    """Anybody of the job asks how it goes."""

    request: Request


class MemberStatus(msgspec.Struct, frozen=True):
    """A member as the master sees it; `doing` is a few words."""

    name: str
    role: Role
    pid: int
    silent_s: float
    doing: str


class Status(Message, frozen=True):
    """How the job goes. `waiting_for` says who is waited for and why, or is empty.

    `epoch` is the one under way (-1 before the first), `step`/`steps` count inside it (batches in `async`);
    `samples` counts samples trained since the start; `live` holds the means of what the script reported inside the
    epoch (its loss), `reported` the last metrics by epoch; `counters` count what was refused or repeated.
    """

    request: Request
    job: str
    phase: str
    waiting_for: str
    epoch: int
    epochs: int
    step: int
    steps: int
    version: int
    samples: int
    samples_per_s: float
    live: dict[str, float]
    reported: dict[int, dict[str, float]]
    members: tuple[MemberStatus, ...]
    counters: dict[str, int]
    notes: tuple[str, ...]
    ended: bool
    failure: str | None


class StopJob(Message, frozen=True):
    """The launcher asks the master to end the job, with this failure or without one."""

    request: Request
    failure: str | None


class Noted(Message, frozen=True):
    """A message that needs no other answer has been dealt with."""

    request: Request


AnyMessage = (
    Join | Joined | Refused | Heartbeat | HeartbeatReply | Leave | Unknown | AskLeader | LeaderIs | Left | Exited
    | Agree | Agreed | Ask | EpochIs | InitTask | SyncTask | AsyncTask | EvalTask | SaveTask | Over | TotalsAre
    | Ended | ReportMetrics | Restore | Restored | Commit | Committed | Missing | Deposed | Shutdown | Pull | Pulled
    | Stale | Push | PushBatch | Pushed | Where | Here | Export | Exported | CountRows | RowCounts | AskStatus
    | Status | StopJob | Noted
)  # fmt: skip
