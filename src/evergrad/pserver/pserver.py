"""The pserver: holds one place of the model, stages pushes and applies them when they are committed.

A pure function of the messages it gets, in their order: no clock, no thread, no socket.

Invariants:
1. A pull changes nothing; rows are made by commits (`Sync`) and batches (`Async`) only.
2. `version` grows by one with each commit and by nothing else; a commit is applied at its own version or not at all.
3. What is staged for the present version stays until its commit or a new generation.
4. In `Async` `progress[task]` batches of a task of the present epoch are applied, each once, in order.
"""

from collections import Counter
from math import inf

from evergrad.errors import InvariantError
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    AnyMessage,
    Attempt,
    Commit,
    Committed,
    CountRows,
    Deposed,
    Export,
    Exported,
    Full,
    Generation,
    Here,
    Member,
    Message,
    Missing,
    Place,
    Pull,
    Pulled,
    Push,
    PushBatch,
    Pushed,
    Refused,
    Request,
    Restore,
    Restored,
    RowCounts,
    Send,
    Shutdown,
    Stale,
    Term,
    Where,
)
from evergrad.pserver.admission import Admission
from evergrad.pserver.memory import Room
from evergrad.pserver.model import Contribution, Model
from evergrad.pserver.parts import Parts

OfModel = Pull | Push | PushBatch | Where | Export | CountRows
"""Requests about a generation's model, each of one trainer."""

ALL_BATCHES = 2**62
"""How many batches of a task are applied whose epoch has passed: all."""


class Pserver:
    """One pserver process's state. `is_over` turns true when the master has said that the job has ended.

    Args:
        member: this incarnation.
        room: bytes of memory that may still be taken; a push that may need more is refused.
    """

    def __init__(self, member: Member, room: Room = lambda: inf) -> None:
        self.member = member
        self._room = room
        self.term = Term(0)
        self.generation = Generation(0)
        self.is_over = False
        self.counters: Counter[str] = Counter()
        self._place = Place(0)
        self._version = INIT_STEP
        self._held: tuple[Model, Admission] | None = None
        self._staged: dict[tuple[int, Attempt], Push] = {}
        self._parts = Parts()
        self._promised: Counter[int] = Counter()
        """Keys staged of each table, for which there must be memory."""
        self._last_commit: Commit | None = None
        self._parked: dict[tuple[str, Request], Pull] = {}
        self._epoch = 0
        self._progress: dict[int, int] = {}

    def handle(self, src: str, message: AnyMessage) -> list[Send]:
        """Deal with one message from `src`; returns what to send."""
        match message:
            case Restore() | Commit() | Shutdown():
                return self._from_master(src, message)
            case Pull() | Push() | PushBatch() | Where() | Export() | CountRows():
                return self._from_trainer(src, message)
            case _:
                self.counters["unexpected messages"] += 1
                return []

    # -- the master ----------------------------------------------------------------------------------------------------

    def _from_master(self, src: str, message: Restore | Commit | Shutdown) -> list[Send]:
        if message.term < self.term:
            self.counters["messages of an older master"] += 1
            return [Send(src, Deposed(self.term))]
        self.term = message.term
        match message:
            case Restore():
                return self._restore(src, message)
            case Commit():
                return self._commit(src, message)
            case Shutdown():
                self.is_over = True
                return []

    def _restore(self, src: str, message: Restore) -> list[Send]:
        if message.member != self.member:
            self.counters["messages for another incarnation"] += 1
            return []
        sends = []
        if message.generation > self.generation:
            self.generation, self._place, self._version = message.generation, message.place, INIT_STEP
            sends = [Send(peer, self._stale(pull.request)) for (peer, _), pull in self._parked.items()]
            part = (message.schema, message.place, message.places)
            self._held = Model(*part), Admission(*part)
            self._staged, self._parked, self._last_commit, self._promised = {}, {}, None, Counter()
            self._parts.clear()
            self._epoch, self._progress = 0, {}
        if message.generation == self.generation:
            restored = Restored(self.term, self.generation, self._place, self.member, self._version)
            sends.append(Send(src, restored))
        return sends

    def _commit(self, src: str, message: Commit) -> list[Send]:
        if message.generation != self.generation or self._held is None or message.step > self._version:
            return []
        if message.step == self._version:
            found = [self._staged.get(key) for key in message.chosen]
            pushes = [push for push in found if push is not None]
            if len(pushes) < len(found):
                self.counters["commits naming a push not held"] += 1
                return [Send(src, Missing(self.term, self.generation, self._place, message.step))]
            self._apply(self._held[0], message, pushes)
        else:
            self._check_repeated(message)
        committed = Committed(self.term, self.generation, self._place, message.step)
        return [Send(src, committed), *self._unpark()]

    def _apply(self, model: Model, commit: Commit, pushes: list[Push]) -> None:
        if commit.step == INIT_STEP:
            model.set_dense(span for push in pushes for span in push.groups)
        elif pushes:
            model.update([Contribution(push.samples, push.tables, push.groups, push.evict) for push in pushes])
        self._version += 1
        self._staged, self._last_commit, self._promised = {}, commit, Counter()
        self._parts.clear()

    def _check_repeated(self, commit: Commit) -> None:
        self.counters["repeated commits"] += 1
        last = self._last_commit
        if last is not None and last.step == commit.step and last.chosen != commit.chosen:
            raise InvariantError(f"step {commit.step} was applied as {last.chosen} and is now named as {commit.chosen}")

    def _unpark(self) -> list[Send]:
        parked, self._parked = self._parked, {}
        return [send for (peer, _), pull in parked.items() for send in self._from_trainer(peer, pull)]

    # -- trainers ------------------------------------------------------------------------------------------------------

    def _from_trainer(self, src: str, message: OfModel) -> list[Send]:
        """Requests of an older generation are refused; those of a newer one wait, by being sent again."""
        if message.generation < self.generation:
            self.counters["requests of an older generation"] += 1
            return [Send(src, self._stale(message.request))]
        if message.generation > self.generation or self._held is None:
            return []
        answer = self._answer(src, message, *self._held)
        return [Send(src, answer)] if answer is not None else []

    def _answer(self, src: str, message: OfModel, model: Model, admission: Admission) -> Message | None:
        match message:
            case Pull():
                return self._pull(src, message, model, admission)
            case Push():
                return self._push(message, model, admission)
            case PushBatch():
                return self._push_batch(src, message, model, admission)
            case Where():
                return Here(message.request, self._batches(message.epoch, message.task))
            case Export():
                return self._export(message, model, admission)
            case CountRows():
                return self._count_rows(message, model)

    def _pull(self, src: str, pull: Pull, model: Model, admission: Admission) -> Message | None:
        if self._is_ahead(pull.version):
            self._parked[src, pull.request] = pull
            return None
        if not self._has(pull.version):
            return self._stale(pull.request)
        reasons = [admission.refuse_keys(asked.table, asked.keys) for asked in pull.tables]
        reasons += [admission.refuse_span(span) for span in pull.groups]
        if reason := next((reason for reason in reasons if reason), None):
            return self._refused(pull.request, reason)
        rows = tuple(model.rows(t.table, t.keys, pull.evaluating) for t in pull.tables)
        groups = tuple(model.span(g.group)[g.start : g.stop] for g in pull.groups)
        return Pulled(pull.request, self._version, rows, groups)

    def _push(self, push: Push, model: Model, admission: Admission) -> Message | None:
        if push.step > self._version:
            return None
        if push.step < self._version:
            self.counters["pushes for a committed step"] += 1
            return self._stale(push.request)
        key = (push.task, push.attempt)
        if key in self._staged:
            self.counters["repeated pushes"] += 1
            return Pushed(push.request)
        if refusal := self._refuse_part(push, push.step, push.samples, model, admission):
            return refusal
        whole = self._parts.add(key, push)
        if whole is not None:
            if reason := admission.refuse_whole(push.step, whole.groups):
                return self._refused(push.request, reason)
            self._staged[key] = whole
        self._promised += _keys_of(push)
        return Pushed(push.request)

    def _push_batch(self, src: str, push: PushBatch, model: Model, admission: Admission) -> Message | None:
        applied = self._batches(push.epoch, push.task)
        if self._version == INIT_STEP or push.batch > applied:
            return None
        if push.batch < applied:
            self.counters["repeated pushes"] += 1
            return Pushed(push.request)
        if refusal := self._refuse_part(push, self._version, 1, model, admission):
            return refusal
        whole = self._parts.add((src, push.epoch, push.task, push.batch), push)
        if whole is None:
            return Pushed(push.request)
        if reason := admission.refuse_whole(self._version, whole.groups):
            return self._refused(push.request, reason)
        if push.epoch > self._epoch:
            self._epoch, self._progress = push.epoch, {}
            self._parts.clear()
        model.update([Contribution(1, whole.tables, whole.groups, whole.evict)])
        self._progress[push.task] = push.batch + 1
        self._parts.forget(lambda key: key[1:3] == (push.epoch, push.task) and key[3] <= push.batch)
        return Pushed(push.request)

    def _full(self, push: Push | PushBatch, model: Model) -> Full | None:
        needed, room = model.bytes_needed(self._promised + _keys_of(push)), self._room()
        if needed <= room:
            return None
        self.counters["pushes refused for lack of memory"] += 1
        rows = sum(model.row_counts())
        return Full(
            push.request,
            f"pserver {self._place} is at its memory limit: it holds {rows:,} rows, a push may need {needed:,} bytes"
            f" and {max(0, int(room)):,} are left; start the job with more --pservers or a larger --memory",
        )

    def _refuse_part(
        self, push: Push | PushBatch, step: int, samples: int, model: Model, admission: Admission
    ) -> Refused | Full | None:
        """The refusal of a push, or of a part of one, that is wrong or does not fit; None if it is taken."""
        reason = (
            admission.refuse_part(push.part, push.parts)
            or admission.refuse_evictions(push.evict)
            or admission.refuse_push(step, samples, push.tables, push.groups)
        )
        return self._refused(push.request, reason) if reason else self._full(push, model)

    def _batches(self, epoch: int, task: int) -> int:
        """Batches applied of a task. An epoch begins only when all tasks of the one before are done."""
        if epoch < self._epoch:
            return ALL_BATCHES
        return self._progress.get(task, 0) if epoch == self._epoch else 0

    def _count_rows(self, message: CountRows, model: Model) -> Message | None:
        if self._is_ahead(message.version):
            return None
        if not self._has(message.version):
            return self._stale(message.request)
        return RowCounts(message.request, model.row_counts())

    def _export(self, message: Export, model: Model, admission: Admission) -> Message | None:
        if self._is_ahead(message.version):
            return None
        if not self._has(message.version):
            return self._stale(message.request)
        if reason := admission.refuse_export(message.table, message.slot):
            return self._refused(message.request, reason)
        return Exported(message.request, *model.export(message.table, message.part, message.slot, message.limit))

    def _is_ahead(self, version: int) -> bool:
        """Whether this version is still to come here."""
        return self._version == INIT_STEP or version > self._version

    def _has(self, version: int) -> bool:
        return self._version != INIT_STEP and version in (NEWEST, self._version)

    def _stale(self, request: Request) -> Stale:
        return Stale(request, self.generation, self._version)

    def _refused(self, request: Request, reason: str) -> Refused:
        self.counters["refused requests"] += 1
        return Refused(request, reason)


def _keys_of(push: Push | PushBatch) -> Counter[int]:
    """How many keys of each table are pushed."""
    return Counter({t.table: t.keys.size for t in push.tables})
