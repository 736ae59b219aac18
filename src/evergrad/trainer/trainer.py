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
    AskCheckpoint,
    AskLeader,
    AsyncTask,
    Attempt,
    Begin,
    CheckpointSpec,
    CountRows,
    Done,
    Ended,
    EpochIs,
    EvalTask,
    Export,
    Exported,
    ExportPart,
    Floats,
    Full,
    Generation,
    GiveUp,
    GroupGrads,
    GroupKind,
    Here,
    InitTask,
    Join,
    Joined,
    LeaderIs,
    Leave,
    MayBegin,
    Member,
    Message,
    Noted,
    Over,
    PserverAt,
    Pull,
    Pulled,
    Push,
    PushBatch,
    Pushed,
    Raised,
    Refused,
    ReportMetrics,
    Request,
    Role,
    RowCounts,
    SaveTask,
    Schema,
    Send,
    Stale,
    StartAgain,
    SyncTask,
    TableGrads,
    TableKeys,
    Term,
    TotalsAre,
    Unknown,
    Want,
    Where,
    Wire,
)
from evergrad.placement import slots_owned, span_owned
from evergrad.trainer.collected import Collected, Wanted, joined
from evergrad.trainer.cutting import MESSAGE_BYTES, PIECE_BYTES, cut_pull, cut_push
from evergrad.trainer.exchange import Exchange, Flow, Heard, unheard
from evergrad.trainer.routing import Routed, route

M = TypeVar("M", bound=Message)

Answer = EpochIs | InitTask | SyncTask | AsyncTask | EvalTask | SaveTask | Over | TotalsAre
"""What the master answers to an ask."""

AGAIN_STATUS = 75
"""The exit status of a trainer that asks to be started again."""
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


class MustStartAgain(SystemExit):
    """The job is behind where the script is, or far ahead; the process ends and is started again."""

    def __init__(self) -> None:
        super().__init__(AGAIN_STATUS)


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


class Offer(NamedTuple):
    """What a trainer brings to a job besides its model: of the first one it counts; see `Agree`."""

    initial: str = ""
    checkpoints: CheckpointSpec | None = None
    warm_start: str | None = None


NO_OFFER = Offer()


class RowGrads(NamedTuple):
    """Gradients of different keys of a table, shape (n,) and (n, dim), of the type that the job's wire has."""

    table: int
    lr: float
    keys: NDArray[np.int64]
    grads: AnyArray


class SpanGrads(NamedTuple):
    """Gradients or new values of a whole dense group; `present[i]`: parameter i has one."""

    group: int
    lr: float
    values: AnyArray
    present: NDArray[np.uint8]


class Part(NamedTuple):
    """One of `of` messages that a push to a pserver consists of."""

    number: int
    of: int
    tables: tuple[TableGrads, ...]
    groups: tuple[GroupGrads, ...]


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
        message_bytes: larger pulls and pushes are cut into messages of about this size.
        piece_bytes: larger pulls are cut into pieces no smaller than this, several of which are asked for at once.
    """

    def __init__(
        self,
        exchange: Exchange,
        master: Address,
        identity: Identity,
        new_member: Callable[[], Member],
        message_bytes: int = MESSAGE_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.member = Member("")
        self._exchange = exchange
        self._master = master
        self._identity = identity
        self._new_member = new_member
        self._offer = NO_OFFER
        self._generation = Generation(0)
        self._began: Generation | None = None
        self._newest = Generation(0)
        self._term = Term(0)
        self._is_void = False
        """Whether what is being done was handed out by an older master than the present one."""
        self._message_bytes, self._piece_bytes = message_bytes, piece_bytes
        self._schema: Schema | None = None
        self._pservers: tuple[PserverAt, ...] = ()
        self._place_of_slot = np.zeros(0, np.uint16)

    # -- the master ----------------------------------------------------------------------------------------------------

    def join(self) -> Flow[None]:
        """Become a member."""
        answer: Message | None = None
        while not isinstance(answer, Joined):
            self.member = self._new_member()
            name, pid, numerics = self._identity
            request = self._exchange.number()
            join = Join(request, Role.TRAINER, self.member, name, pid, numerics, began=self._began)
            answer = yield from self._ask_master(request, join, Joined, Unknown)
        self._began = answer.generation if self._began is None else min(self._began, answer.generation)
        self._lead(answer.term)

    def agree(self, schema: Schema, offer: Offer = NO_OFFER) -> Flow[None]:
        """Name the model; returns when the pservers hold it.

        Args:
            schema: the model.
            offer: what counts if this trainer is the first.
        Raises:
            ConfigError: the job has another model; the text says what differs.
        """
        self._offer = offer
        while True:
            request = self._exchange.number()
            agree = Agree(request, self.member, schema, *offer)
            answer = yield from self._ask_master(request, agree, Agreed, Unknown)
            if isinstance(answer, Agreed):
                break
            yield from self.join()
        self._generation = answer.generation
        self.connect(schema, answer.pservers)

    def hear(self, generation: Generation, is_whole: bool = True) -> None:
        """The master has told the present generation: what was asked of pservers in an older one is void.

        So it is in this one where a pserver is gone (not `is_whole`): there will be a newer one.
        """
        if generation > self._newest or (generation == self._newest and not is_whole):
            self._newest = generation
            self._exchange.void({p.address for p in self._pservers}, generation)

    def hear_term(self, term: Term) -> None:
        """The master has told its term: what the one before was asked is lost, and asked again now."""
        if term > self._term:
            self._lead(term)
            self._exchange.hurry()

    def _lead(self, term: Term) -> None:
        """A master leads, to whom no attempt of an older one counts, and what was asked of pservers for it is void.

        It may be of a step that will never come: its commit may have died with the master.
        """
        if term > self._term > 0:
            self._is_void = True
            self._exchange.void({p.address for p in self._pservers}, self._newest)
            self._newest = self._generation  # a newer one may never have been recorded
        self._term = max(self._term, term)

    def connect(self, schema: Schema, pservers: tuple[PserverAt, ...]) -> None:
        """Talk to these pservers about this model from now on."""
        self._schema, self._pservers = schema, pservers
        places = len(pservers)
        sizes = [len(slots_owned(place, places)) for place in range(places)]
        self._place_of_slot = np.repeat(np.arange(places, dtype=np.uint16), sizes)

    def ask(self, want: Want, done: Done | None) -> Flow[Answer]:
        """Say what is done and where the script is; returns what to do next.

        Raises:
            ConfigError: refused, with the reason.
            JobOver: the job has ended.
        """
        answers = (EpochIs, InitTask, SyncTask, AsyncTask, EvalTask, SaveTask, Over, TotalsAre)
        answer = yield from self._ask_as_member(lambda request: Ask(request, self.member, want, done), *answers)
        if isinstance(answer, InitTask | SyncTask | AsyncTask | EvalTask | SaveTask):
            self._is_void = answer.term < self._term
            self.hear(answer.generation)
            if self._generation < answer.generation and self._schema is not None:
                yield from self.agree(self._schema, self._offer)
        return answer  # type: ignore[return-value]  # the tuple above is Answer

    def may_begin(self, task: AsyncTask, done: int) -> Flow[None]:
        """Wait until this trainer may begin another batch of a task, of which it has done so many.

        Raises:
            Void: the attempt counts no more.
        """

        def make(request: Request) -> Message:
            return MayBegin(request, self.member, task.attempt, done)

        answer = yield from self._ask_as_member(make, Begin, GiveUp)
        if isinstance(answer, GiveUp):
            raise Void(task.generation)

    def is_leader(self, saving: Attempt | None = None) -> Flow[bool]:
        """Whether this trainer is the leader, and its attempt at a saving, if it names one, counts."""
        answer = yield from self._ask_as_member(lambda request: AskLeader(request, self.member, saving), LeaderIs)
        return answer.leader

    def report(self, epoch: int, metrics: dict[str, float], best: float | None = None) -> Flow[None]:
        """Have metrics shown, and the checkpoint of the epoch's end rated."""
        yield from self._ask_as_member(lambda request: ReportMetrics(request, self.member, epoch, metrics, best), Noted)

    def ask_checkpoint(self) -> Flow[None]:
        """Have a checkpoint made soon."""
        yield from self._ask_as_member(lambda request: AskCheckpoint(request, self.member), Noted)

    def leave(self, failure: str | None, raised: Raised | None = None) -> Flow[None]:
        """Say goodbye, with the traceback of the script if it raised, and the task if it was in one."""
        request = self._exchange.number()
        yield from self._exchange.ask([(request, Send(self._master, Leave(request, self.member, failure, raised)))])

    def _ask_as_member(self, make: Callable[[Request], Message], *expected: type[M]) -> Flow[M]:
        """Ask what only members may; one that the master has declared dead comes back as a new incarnation first."""
        while True:
            request = self._exchange.number()
            answer = yield from self._ask_master(request, make(request), *expected, Unknown)
            if isinstance(answer, expected):
                return answer
            yield from self.join()
            if self._schema is not None:
                yield from self.agree(self._schema, self._offer)

    # -- the pservers --------------------------------------------------------------------------------------------------

    def pull(
        self,
        generation: Generation,
        version: int,
        keys: Sequence[tuple[int, NDArray[np.int64]]],
        groups: Sequence[int],
        evaluating: bool,
    ) -> Flow[PulledModel]:
        """Read rows of tables (table, different keys) and whole dense groups, in one round trip if they are not large.

        Raises:
            Void: the version has passed.
        """
        routed = [(table, route(wanted, self._place_of_slot, len(self._pservers))) for table, wanted in keys]
        cut = [self._pull_requests(p.place, routed, groups) for p in self._pservers]
        pulled = [Collected(self._wire(), requests) for requests, _ in cut]
        pulled_version = version
        for turn in range(max(-(-len(requests) // at_once) for requests, at_once in cut)):
            sends, asked = [], []
            for p, (requests, at_once) in zip(self._pservers, cut, strict=True):
                for number in range(turn * at_once, min((turn + 1) * at_once, len(requests))):
                    request = self._exchange.number()
                    pull = Pull(request, generation, version, evaluating, *requests[number])
                    sends.append((request, Send(p.address, pull)))
                    asked.append((pulled[p.place], number))

            def take(place: int, answer: Message, asked: Sequence[tuple[Collected, int]] = asked) -> None:
                if isinstance(answer, Pulled):
                    collected, number = asked[place]
                    collected.take(number, answer)

            pulled_version = _all_of(Pulled, (yield from self._ask_pservers(sends, take)))[0].version
        rows = [routing.gather([c.rows(table) for c in pulled]) for table, routing in routed]
        dense = [joined([c.group(group) for c in pulled]) for group in groups]
        return PulledModel(pulled_version, rows, dense)

    def push(
        self,
        task: InitTask | SyncTask,
        step: int,
        index: int,
        samples: int,
        rows: Sequence[RowGrads],
        spans: Sequence[SpanGrads],
        evict: Sequence[TableKeys] = (),
    ) -> Flow[None]:
        """Hand a task's contribution to every pserver; returns when all hold it.

        Raises:
            Void: the step is committed already or the generation has passed.
            PushRefused: a pserver refuses it; the text says why.
        """

        def message(request: Request, part: Part) -> Message:
            number, of, tables, groups = part
            evicted = tuple(evict) if number == 0 else ()
            return Push(
                request, task.generation, step, index, task.attempt, samples, tables, groups, evicted, number, of
            )

        yield from self._push_parts(rows, spans, message)

    def push_batch(
        self,
        task: AsyncTask,
        batch: int,
        rows: Sequence[RowGrads],
        spans: Sequence[SpanGrads],
        evict: Sequence[TableKeys] = (),
        batches: int = 1,
    ) -> Flow[None]:
        """Have every pserver apply so many batches of a task, from `batch` on, as one; raises as `push`."""

        def message(request: Request, part: Part) -> Message:
            number, of, tables, groups = part
            evicted = tuple(evict) if number == 0 else ()
            return PushBatch(
                request, task.generation, task.epoch, task.task, batch, tables, groups, evicted, number, of, batches
            )

        yield from self._push_parts(rows, spans, message)

    def where(self, task: AsyncTask) -> Flow[int]:
        """How many batches of a task every pserver has applied."""
        answers = yield from self._ask_each(lambda request: Where(request, task.generation, task.epoch, task.task))
        return min(here.batches for here in _all_of(Here, answers))

    def count_rows(self, task: SaveTask) -> Flow[list[int]]:
        """How many rows each table has."""
        answers = yield from self._ask_each(lambda request: CountRows(request, task.generation, task.version))
        return [sum(counts) for counts in zip(*(a.counts for a in _all_of(RowCounts, answers)), strict=True)]

    def export(self, task: SaveTask, table: int, part: ExportPart, place: int, slot: int) -> Flow[Exported]:
        """The next piece of a table at one place, sorted by (slot, key)."""
        request = self._exchange.number()
        export = Export(request, task.generation, task.version, table, part, slot, EXPORT_BYTES)
        answers = yield from self._ask_pservers([(request, Send(self._pservers[place].address, export))])
        return _all_of(Exported, answers)[0]

    def places(self) -> int:
        """How many pservers there are."""
        return len(self._pservers)

    def _push_parts(
        self,
        rows: Sequence[RowGrads],
        spans: Sequence[SpanGrads],
        message: Callable[[Request, Part], Message],
    ) -> Flow[None]:
        """Send every pserver its share, in as many parts as the limit of a message asks for, one at a time."""
        cut = [cut_push(*share, self._message_bytes) for share in self._shares(rows, spans)]
        for number in range(max(map(len, cut))):
            sends = []
            for p, parts in zip(self._pservers, cut, strict=True):
                if number < len(parts):
                    request = self._exchange.number()
                    part = Part(number, len(parts), *parts[number])
                    sends.append((request, Send(p.address, message(request, part))))
            _all_of(Pushed, (yield from self._ask_pservers(sends)))

    def _shares(
        self, rows: Sequence[RowGrads], spans: Sequence[SpanGrads]
    ) -> list[tuple[list[TableGrads], list[GroupGrads]]]:
        """What each pserver gets: every table touched, with its keys of it, and its span of every group."""
        places = len(self._pservers)
        routed = [(r, route(r.keys, self._place_of_slot, places)) for r in rows]
        shares = []
        for p in self._pservers:
            tables = [
                TableGrads(r.table, r.lr, routing.keys(p.place), routing.rows(r.grads, p.place))
                for r, routing in routed
            ]
            groups = []
            for s in spans:
                span = span_owned(s.values.size, p.place, places)
                groups.append(GroupGrads(s.group, s.lr, s.values[span.start : span.stop], s.present))
            shares.append((tables, groups))
        return shares

    def _pull_requests(
        self, place: int, routed: Sequence[tuple[int, Routed]], groups: Sequence[int]
    ) -> tuple[list[Wanted], int]:
        """What to ask one pserver for, as `cut_pull` has it."""
        assert self._schema is not None
        item_bytes, places = self._schema.wire.item_bytes, len(self._pservers)
        keys = [(t, routing.keys(place), self._schema.tables[t].dim * item_bytes) for t, routing in routed]
        spans = []
        for group in groups:
            spec = self._schema.groups[group]
            size = len(span_owned(spec.size, place, places))
            spans.append((group, size, 8 if spec.kind is GroupKind.LOWEST else 4))
        return cut_pull(keys, spans, self._message_bytes, self._piece_bytes)

    def _wire(self) -> Wire:
        assert self._schema is not None
        return self._schema.wire

    def _ask_each(self, make: Callable[[Request], Message]) -> Flow[list[Message]]:
        """Ask every pserver the same."""
        sends = []
        for p in self._pservers:
            request = self._exchange.number()
            sends.append((request, Send(p.address, make(request))))
        return (yield from self._ask_pservers(sends))

    def _ask_pservers(self, requests: Sequence[tuple[Request, Send]], heard: Heard = unheard) -> Flow[list[Message]]:
        """Ask the pservers of the generation agreed on; raises `Void` if there is a newer one, or a newer master."""
        if self._newest > self._generation or self._is_void:
            raise Void(self._newest)
        return (yield from self._exchange.ask(requests, heard))

    # -- requests ------------------------------------------------------------------------------------------------------

    def _ask_master(self, request: Request, message: Message, *expected: type[M]) -> Flow[M]:
        (answer,) = yield from self._exchange.ask([(request, Send(self._master, message))])
        match answer:
            case Refused():
                raise ConfigError(answer.reason)
            case Ended():
                raise JobOver(answer.failure)
            case StartAgain():
                raise MustStartAgain
        if not isinstance(answer, expected):
            raise InvariantError(f"the master answered {type(answer).__name__} to {type(message).__name__}")
        return answer


def _all_of(kind: type[M], answers: Sequence[Message]) -> list[M]:
    """The answers, all of the kind expected; raises what they say otherwise."""
    for answer in answers:
        match answer:
            case Refused():
                raise PushRefused(answer.reason)
            case Full():
                raise ConfigError(answer.reason)
            case Stale():
                raise Void(answer.generation)
    kept = [answer for answer in answers if isinstance(answer, kind)]
    if len(kept) < len(answers):
        raise InvariantError(f"a pserver answered {sorted({type(a).__name__ for a in answers})}")
    return kept
