"""The trainer's part of the protocol, as flows (see `exchange.py`)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from evergrad.errors import ConfigError, InvariantError
from evergrad.messages import (
    Address,
    Agree,
    Agreed,
    AnyArray,
    Ask,
    AskLeader,
    AsyncTask,
    CountRows,
    Done,
    Ended,
    EpochIs,
    EvalTask,
    Export,
    Exported,
    ExportPart,
    Floats,
    Generation,
    GroupGrads,
    Here,
    InitTask,
    Join,
    Joined,
    LeaderIs,
    Leave,
    Member,
    Message,
    Over,
    PserverAt,
    Pull,
    Pulled,
    Push,
    PushBatch,
    Pushed,
    Refused,
    ReportMetrics,
    Request,
    Role,
    RowCounts,
    SaveTask,
    Schema,
    Send,
    Stale,
    SyncTask,
    TableGrads,
    TableKeys,
    TotalsAre,
    Unknown,
    Want,
    Where,
)
from evergrad.placement import slots_owned, span_owned
from evergrad.trainer.exchange import Exchange, Flow
from evergrad.trainer.routing import Routed, route

M = TypeVar("M", bound=Message)

Answer = EpochIs | InitTask | SyncTask | AsyncTask | EvalTask | SaveTask | Over | TotalsAre
"""What the master answers to an ask."""

EXPORT_BYTES = 16 << 20
"""A table is read in pieces of about this size when a model is saved."""


class Void(Exception):
    """What is being computed counts no more: its step is committed or its generation has passed.

    `generation` is the pserver's present one.
    """

    def __init__(self, generation: Generation) -> None:
        super().__init__("the job has gone on without it")
        self.generation = generation


class PushRefused(Exception):
    """A pserver refuses a push; nothing of it was applied."""


class JobOver(SystemExit):
    """The job has ended elsewhere; unwinds the script. `failure` says why, if it failed."""

    def __init__(self, failure: str | None) -> None:
        super().__init__(0 if failure is None else 1)
        self.failure = failure


class Identity(NamedTuple):
    """What people and the master know a trainer by."""

    name: str
    pid: int
    numerics: str


class RowGrads(NamedTuple):
    """Gradients of different keys of a table, shape (n,) and (n, dim)."""

    table: int
    lr: float
    keys: NDArray[np.int64]
    grads: Floats


class SpanGrads(NamedTuple):
    """Gradients or new values of a whole dense group; `present[i]`: parameter i has one."""

    group: int
    lr: float
    values: AnyArray
    present: NDArray[np.uint8]


class PulledModel(NamedTuple):
    """Rows in the order of the keys asked, whole dense groups, and the version they are of."""

    version: int
    rows: list[Floats]
    groups: list[AnyArray]


class Trainer:
    """One trainer's conversation with the master and the pservers.

    Args:
        exchange: carries the requests.
        master: where the master listens.
        identity: who this is.
        new_member: makes a new incarnation; called at the first join and whenever the master has declared the last
            one dead.
    """

    def __init__(
        self, exchange: Exchange, master: Address, identity: Identity, new_member: Callable[[], Member]
    ) -> None:
        self.member = Member("")
        self._exchange = exchange
        self._master = master
        self._identity = identity
        self._new_member = new_member
        self._schema: Schema | None = None
        self._pservers: tuple[PserverAt, ...] = ()
        self._place_of_slot = np.zeros(0, np.uint16)

    # -- the master ----------------------------------------------------------------------------------------------------

    def join(self) -> Flow[None]:
        """Become a member."""
        self.member = self._new_member()
        name, pid, numerics = self._identity
        request = self._exchange.number()
        join = Join(request, Role.TRAINER, self.member, name, pid, numerics)
        yield from self._ask_master(request, join, Joined)

    def agree(self, schema: Schema) -> Flow[None]:
        """Name the model; returns when the pservers hold it.

        Raises:
            ConfigError: the job has another model; the text says what differs.
        """
        self._schema = schema
        while True:
            request = self._exchange.number()
            answer = yield from self._ask_master(request, Agree(request, self.member, schema), Agreed, Unknown)
            if isinstance(answer, Agreed):
                break
            yield from self.join()
        self._pservers = answer.pservers
        places = len(self._pservers)
        sizes = [len(slots_owned(place, places)) for place in range(places)]
        self._place_of_slot = np.repeat(np.arange(places, dtype=np.uint16), sizes)

    def ask(self, want: Want, done: Done | None) -> Flow[Answer]:
        """Say what is done and where the script is; returns what to do next.

        Raises:
            ConfigError: refused, with the reason.
            JobOver: the job has ended.
        """
        while True:
            request = self._exchange.number()
            answer = yield from self._ask_master(
                request,
                Ask(request, self.member, want, done),
                *(Unknown, EpochIs, InitTask, SyncTask, AsyncTask, EvalTask, SaveTask, Over, TotalsAre),
            )
            if not isinstance(answer, Unknown):
                return answer  # type: ignore[return-value]  # the tuple above is Answer and Unknown
            yield from self._rejoin()

    def is_leader(self) -> Flow[bool]:
        """Whether this trainer is the leader."""
        while True:
            request = self._exchange.number()
            answer = yield from self._ask_master(request, AskLeader(request, self.member), LeaderIs, Unknown)
            if isinstance(answer, LeaderIs):
                return answer.leader
            yield from self._rejoin()

    def report(self, epoch: int, metrics: dict[str, float]) -> Flow[None]:
        """Have metrics shown."""
        request = self._exchange.number()
        yield from self._call([(request, Send(self._master, ReportMetrics(request, self.member, epoch, metrics)))])

    def leave(self, failure: str | None) -> Flow[None]:
        """Say goodbye, with the traceback of the script if it raised."""
        request = self._exchange.number()
        yield from self._call([(request, Send(self._master, Leave(request, self.member, failure)))])

    def _rejoin(self) -> Flow[None]:
        """The master has declared this trainer dead: come back as a new incarnation."""
        yield from self.join()
        if self._schema is not None:
            yield from self.agree(self._schema)

    # -- the pservers --------------------------------------------------------------------------------------------------

    def pull(
        self,
        generation: Generation,
        version: int,
        keys: Sequence[tuple[int, NDArray[np.int64]]],
        groups: Sequence[int],
        evaluating: bool,
    ) -> Flow[PulledModel]:
        """Read rows of tables (table, different keys) and whole dense groups, in one round trip per pserver.

        Raises:
            Void: the version has passed.
        """
        routed = [(table, route(wanted, self._place_of_slot, len(self._pservers))) for table, wanted in keys]
        sends = []
        for p in self._pservers:
            request = self._exchange.number()
            tables = tuple(TableKeys(table, routing.keys(p.place)) for table, routing in routed)
            pull = Pull(request, generation, version, evaluating, tables, tuple(groups))
            sends.append((request, Send(p.address, pull)))
        answers = _all_of(Pulled, (yield from self._call(sends)))
        rows = [routing.gather([a.rows[i] for a in answers]) for i, (_, routing) in enumerate(routed)]
        dense = [_joined([a.groups[i] for a in answers]) for i in range(len(groups))]
        return PulledModel(answers[0].version, rows, dense)

    def push(
        self,
        task: InitTask | SyncTask,
        step: int,
        index: int,
        samples: int,
        rows: Sequence[RowGrads],
        spans: Sequence[SpanGrads],
    ) -> Flow[None]:
        """Hand a task's contribution to every pserver; returns when all hold it.

        Raises:
            Void: the step is committed already or the generation has passed.
            PushRefused: a pserver refuses it; the text says why.
        """
        sends = []
        for p, (tables, groups) in self._cut(rows, spans):
            request = self._exchange.number()
            push = Push(request, task.generation, step, index, task.attempt, samples, tables, groups)
            sends.append((request, Send(p.address, push)))
        _all_of(Pushed, (yield from self._call(sends)))

    def push_batch(
        self, task: AsyncTask, batch: int, rows: Sequence[RowGrads], spans: Sequence[SpanGrads]
    ) -> Flow[None]:
        """Have every pserver apply one batch of an asynchronous task; raises as `push`."""
        sends = []
        for p, (tables, groups) in self._cut(rows, spans):
            request = self._exchange.number()
            push = PushBatch(request, task.generation, task.epoch, task.task, batch, tables, groups)
            sends.append((request, Send(p.address, push)))
        _all_of(Pushed, (yield from self._call(sends)))

    def where(self, task: AsyncTask) -> Flow[int]:
        """How many batches of a task every pserver has applied."""
        sends = []
        for p in self._pservers:
            request = self._exchange.number()
            sends.append((request, Send(p.address, Where(request, task.generation, task.epoch, task.task))))
        return min(here.batches for here in _all_of(Here, (yield from self._call(sends))))

    def count_rows(self, task: SaveTask) -> Flow[list[int]]:
        """How many rows each table has."""
        sends = []
        for p in self._pservers:
            request = self._exchange.number()
            sends.append((request, Send(p.address, CountRows(request, task.generation, task.version))))
        answers = _all_of(RowCounts, (yield from self._call(sends)))
        return [sum(counts) for counts in zip(*(a.counts for a in answers), strict=True)]

    def export(self, task: SaveTask, table: int, part: ExportPart, place: int, slot: int) -> Flow[Exported]:
        """The next piece of a table at one place, sorted by (slot, key)."""
        request = self._exchange.number()
        export = Export(request, task.generation, task.version, table, part, slot, EXPORT_BYTES)
        answers = yield from self._call([(request, Send(self._pservers[place].address, export))])
        return _all_of(Exported, answers)[0]

    def places(self) -> int:
        """How many pservers there are."""
        return len(self._pservers)

    def _cut(
        self, rows: Sequence[RowGrads], spans: Sequence[SpanGrads]
    ) -> list[tuple[PserverAt, tuple[tuple[TableGrads, ...], tuple[GroupGrads, ...]]]]:
        """What each pserver gets: every table touched, with its keys of it, and its span of every group."""
        places = len(self._pservers)
        routed: list[tuple[RowGrads, Routed]] = [(r, route(r.keys, self._place_of_slot, places)) for r in rows]
        cut = []
        for p in self._pservers:
            tables = tuple(
                TableGrads(r.table, r.lr, routing.keys(p.place), routing.rows(r.grads, p.place))
                for r, routing in routed
            )
            groups = []
            for s in spans:
                span = span_owned(s.values.size, p.place, places)
                groups.append(GroupGrads(s.group, s.lr, s.values[span.start : span.stop], s.present))
            cut.append((p, (tables, tuple(groups))))
        return cut

    # -- requests ------------------------------------------------------------------------------------------------------

    def _call(self, requests: Sequence[tuple[Request, Send]]) -> Flow[list[Message]]:
        return self._exchange.ask(requests)

    def _ask_master(self, request: Request, message: Message, *expected: type[M]) -> Flow[M]:
        (answer,) = yield from self._call([(request, Send(self._master, message))])
        match answer:
            case Refused():
                raise ConfigError(answer.reason)
            case Ended():
                raise JobOver(answer.failure)
        if not isinstance(answer, expected):
            raise InvariantError(f"the master answered {type(answer).__name__} to {type(message).__name__}")
        return answer


def _all_of(kind: type[M], answers: Sequence[Message]) -> list[M]:
    """The answers, all of the kind expected; raises what they say otherwise."""
    for answer in answers:
        match answer:
            case Refused():
                raise PushRefused(answer.reason)
            case Stale():
                raise Void(answer.generation)
    kept = [answer for answer in answers if isinstance(answer, kind)]
    if len(kept) < len(answers):
        raise InvariantError(f"a pserver answered {sorted({type(a).__name__ for a in answers})}")
    return kept


def _joined(parts: Sequence[AnyArray]) -> AnyArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
