"""Trainer to master: where its script is, what is done, what to do next."""

import msgspec

from evergrad.messages.model import CheckpointSpec, DataSpec, Schema
from evergrad.messages.types import Address, Attempt, Generation, Member, Message, Numbers, Place, Request, Term


class Agree(Message, frozen=True):
    """A trainer names the model it trains. Answered when all pservers hold it, or with what differs.

    `initial` is a digest of the dense values it was made with; the first trainer's `checkpoints` count, and the
    checkpoint it would begin with where there is none of the job's own (`warm_start`).
    """

    request: Request
    member: Member
    schema: Schema
    initial: str = ""
    checkpoints: CheckpointSpec | None = None
    warm_start: str | None = None


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
    """Position in the script: inside the `ordinal`-th `evaluate` of an epoch; `is_outside`: before it."""

    epoch: int
    ordinal: int
    data: DataSpec
    is_outside: bool = False


class WantSaved(msgspec.Struct, frozen=True, tag=True):
    """Position in the script: inside the `ordinal`-th `save_model` of an epoch; `is_outside`: before it."""

    epoch: int
    ordinal: int
    path: str
    is_outside: bool = False


class WantEnd(msgspec.Struct, frozen=True, tag=True):
    """Position in the script: past its end."""


Want = WantEpoch | WantBatch | WantTotals | WantSaved | WantEnd


class Partial(msgspec.Struct, frozen=True):
    """A metric of some samples that adds up with those of others; see `metrics.py`."""

    kind: str
    values: Numbers


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


class TrainDone(msgspec.Struct, frozen=True, tag=True):
    """A task was computed; `contributed` tells whether every pserver holds its push. `metrics` are for show."""

    generation: Generation
    attempt: Attempt
    contributed: bool
    metrics: dict[str, Partial]


class EvalDone(msgspec.Struct, frozen=True, tag=True):
    """An evaluation task was computed, or the script raised in it (`failure`), which ends the evaluation for all."""

    generation: Generation
    attempt: Attempt
    totals: dict[str, Partial]
    failure: str | None = None


class SaveDone(msgspec.Struct, frozen=True, tag=True):
    """The leader has the model saved, or could not (`failure`)."""

    generation: Generation
    attempt: Attempt
    failure: str | None = None


class BreakDone(msgspec.Struct, frozen=True, tag=True):
    """The script left the `batches` of an epoch, which ends for all; and loops over epochs up to `left_until`.

    `last` is the task that was done in the turn of the loop that was the last, and `generation` that of its batch; None
    if the loop was not left at a batch. `version`: that of the first model with what was trained of that task; None in
    `Async`.
    """

    epoch: int
    left_until: int
    last: TrainDone | None = None
    generation: Generation | None = None
    version: int | None = None


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
    """One batch of step `step`: positions [start, stop) of the epoch order. `index` is its number in the step.

    In `LocalSGD` several batches, one after the other. `first` is the number of the first, counted along one path of
    tasks over all steps: a trainer's own learning rates depend on it.
    """

    request: Request
    term: Term
    generation: Generation
    attempt: Attempt
    epoch: int
    step: int
    index: int
    start: int
    stop: int
    first: int = 0


class TaskBatches(msgspec.Struct, frozen=True):
    """The batches of a task of `Async`: positions [start, stop) of the epoch order, `batch_size` at a time.

    `first` is the number, counted over all epochs, of the first of them: learning rates depend on it.
    """

    task: int
    start: int
    stop: int
    first: int


class AsyncTask(Message, frozen=True):
    """Several batches, as in `TaskBatches`.

    `following` are those of the task that its trainer is likely to get next, so that it can prepare for it; nothing is
    promised.
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
    following: TaskBatches | None = None

    @property
    def batches(self) -> TaskBatches:
        """Those of this task."""
        return TaskBatches(self.task, self.start, self.stop, self.first)


class MayBegin(Message, frozen=True):
    """May this trainer begin another batch, having done so many in this attempt? Asked under bounded staleness."""

    request: Request
    member: Member
    attempt: Attempt
    done: int


class Begin(Message, frozen=True):
    """It may."""

    request: Request


class GiveUp(Message, frozen=True):
    """The attempt counts no more, or not as this trainer's: ask for another task."""

    request: Request


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


class ReportMetrics(Message, frozen=True):
    """Metrics the script reported for an epoch, to be shown; `best` rates the checkpoint of its end."""

    request: Request
    member: Member
    epoch: int
    metrics: dict[str, float]
    best: float | None = None


class AskCheckpoint(Message, frozen=True):
    """Make a checkpoint soon."""

    request: Request
    member: Member


class StartAgain(Message, frozen=True):
    """The job is behind where the asker's script is, or far ahead: the process must start it again."""

    request: Request
