"""The pserver: holds one place of the model, stages pushes and applies them when they are committed.

A pure function of the messages it gets, in their order: no clock, no thread, no socket.

Invariants:
1. A pull changes nothing; rows are made by commits (`Sync`) and batches (`Async`) only.
2. `version` grows by one with each commit and by nothing else; a commit is applied at its own version or not at all.
3. What is staged for the present version stays until its commit or a new generation.
4. In `Async` the batches of a task of the present epoch are applied each once and in order, and none more once the
   epoch is closed (`batches.py`).
5. At most one checkpoint is taken part in, and none that was given up (`cutting.py`).
"""

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import msgspec

from evergrad.checkpoint.pieces import Piece
from evergrad.errors import CheckpointError, ConfigError, InvariantError
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Abandon,
    Abandoned,
    AnyMessage,
    Attempt,
    CloseEpoch,
    Commit,
    Committed,
    CountRows,
    Deposed,
    EpochClosed,
    Export,
    Exported,
    FileInfo,
    Freeze,
    Frozen,
    Full,
    Generation,
    Hello,
    HelloReply,
    Here,
    Mark,
    Marked,
    Member,
    Message,
    Missing,
    Obstacle,
    Place,
    Progress,
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
    Written,
    WrittenNoted,
)
from evergrad.pserver.admission import Admission
from evergrad.pserver.batches import Batches, Standpoint
from evergrad.pserver.cutting import Cutting, Part
from evergrad.pserver.memory import Room
from evergrad.pserver.model import Contribution, Model
from evergrad.pserver.parts import Parts

OfCut = Freeze | Mark | Abandon | WrittenNoted
OfMaster = Restore | Commit | CloseEpoch | Hello | OfCut | Shutdown
"""What a master says."""
OfModel = Pull | Push | PushBatch | Where | Export | CountRows
"""Requests about a generation's model, each of one trainer."""


@dataclass(slots=True)
class Loading:
    """A model that is being loaded: told by `restore`, and where that stands once `progress` is known."""

    restore: Restore
    model: Model
    progress: Progress = field(default_factory=Progress)


class Loaded(NamedTuple):
    """What came of it."""

    bytes_read: int = 0
    seconds: float = 0.0
    failure: str | None = None
    obstacle: Obstacle = Obstacle.DAMAGED


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
        self.restored: Restore | None = None
        """The model held, as the master has told it."""
        self._held: tuple[Model, Admission] | None = None
        self._staged: dict[tuple[int, Attempt], Push] = {}
        self._parts = Parts()
        self._promised: Counter[int] = Counter()
        """Keys staged of each table, for which there must be memory."""
        self._last_commit: Commit | None = None
        self._parked: dict[tuple[str, Request], Pull] = {}
        self._batches = Batches()
        self._cutting = Cutting()
        self._master = ""
        self._loading: Loading | None = None
        self._loaded = Loaded()

    def handle(self, src: str, message: AnyMessage) -> list[Send]:
        """Deal with one message from `src`; returns what to send."""
        match message:
            case (
                Restore()
                | Commit()
                | CloseEpoch()
                | Hello()
                | Freeze()
                | Mark()
                | Abandon()
                | WrittenNoted()
                | Shutdown()
            ):
                return self._from_master(src, message)
            case Pull() | Push() | PushBatch() | Where() | Export() | CountRows():
                return self._from_trainer(src, message)
            case _:
                self.counters["unexpected messages"] += 1
                return []

    # -- the master ----------------------------------------------------------------------------------------------------

    def _from_master(self, src: str, message: OfMaster) -> list[Send]:
        if message.term < self.term:
            self.counters["messages of an older master"] += 1
            return [Send(src, Deposed(self.term))]
        sends = []
        if message.term > self.term:
            self._cutting.give_up_agreement()
            sends = self._let_go() + self._go_on()
        self.term, self._master = message.term, src
        match message:
            case Restore():
                return sends + self._restore(src, message)
            case Commit():
                return sends + self._commit(src, message)
            case CloseEpoch():
                return sends + self._close_epoch(src, message)
            case Hello():
                return [*sends, Send(src, self._hello_reply())]
            case Freeze() | Mark() | Abandon():
                return sends + self._checkpoint(src, message)
            case WrittenNoted():
                self._cutting.note(message.serial)
                return sends
            case Shutdown():
                self.is_over = True
                return sends

    def _hello_reply(self) -> HelloReply:
        at = (self._version, self._last_commit, self._batches.at.epoch, self._batches.standing)
        return HelloReply(self.term, self.generation, self.member, self._place, *at)

    def _restore(self, src: str, message: Restore) -> list[Send]:
        if message.member != self.member:
            self.counters["messages for another incarnation"] += 1
            return []
        sends = []
        if message.generation > self.generation:
            self.generation, self._place, self._version = message.generation, message.place, INIT_STEP
            sends = self._let_go()
            self._forget()
            model = Model(message.schema, message.place, message.places)
            if message.source is None:
                self._hold(message, model)
            else:
                self._loading = Loading(message, model)
        if message.generation == self.generation and self._loading is None:
            sends.append(Send(src, self._restored_now()))
        return sends

    def _forget(self) -> None:
        """Drop all of the generation before, so that its memory is free before the next one takes any."""
        self._cutting.give_up_all()
        while self._cutting.release():
            pass
        self._held = self._loading = self.restored = None
        self._staged, self._last_commit, self._promised = {}, None, Counter()
        self._parts.clear()
        self._batches = Batches()
        self._loaded = Loaded()

    def _hold(self, restore: Restore, model: Model) -> None:
        self.restored = restore
        self._held = model, Admission(restore.schema, restore.place, restore.places)

    def _restored_now(self) -> Restored:
        rows = () if self._held is None else self._held[0].row_counts()
        at = (self.term, self.generation, self._place, self.member, self._version)
        return Restored(*at, rows, *self._loaded)

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
            if message.serial is not None:
                self._cutting.cut(message.serial, self._held[0])
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

    def _close_epoch(self, src: str, message: CloseEpoch) -> list[Send]:
        if message.generation != self.generation:
            return []
        self._cutting.give_up_agreement()  # what it waits for comes no more
        self._begin_epoch(message.epoch + 1)
        return [Send(src, EpochClosed(self.term, self.generation, self._place, message.epoch)), *self._go_on()]

    def _let_go(self) -> list[Send]:
        """Nobody waits for a version any more: a step of an older master may never come."""
        parked, self._parked = self._parked, {}
        return [Send(peer, self._stale(pull.request)) for (peer, _), pull in parked.items()]

    def _unpark(self) -> list[Send]:
        parked, self._parked = self._parked, {}
        return [send for (peer, _), pull in parked.items() for send in self._from_trainer(peer, pull)]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _checkpoint(self, src: str, message: Freeze | Mark | Abandon) -> list[Send]:
        if message.generation != self.generation or self._held is None:
            return []
        if isinstance(message, Abandon) or (part := self._cutting.turn_to(message.serial)) is None:
            return self._give_up(src, message.serial)
        return self._freeze(src, part) if isinstance(message, Freeze) else self._mark(src, part, message)

    def _give_up(self, src: str, serial: int) -> list[Send]:
        self._cutting.give_up(serial)
        return [Send(src, Abandoned(self.term, self.generation, self._place, serial)), *self._go_on()]

    def _freeze(self, src: str, part: Part) -> list[Send]:
        if part.is_taken or part.target is not None:
            return []  # said again after what came of it
        part.is_frozen = True
        at = (self._batches.at.epoch, self._batches.standing)
        return [Send(src, Frozen(self.term, self.generation, self._place, part.serial, *at))]

    def _mark(self, src: str, part: Part, mark: Mark) -> list[Send]:
        if not part.is_taken:
            if self._version < mark.version:
                return []
            target = Standpoint(mark.epoch, dict(mark.standing))
            if self._version > mark.version or self._batches.at.is_beyond(target):
                self.counters["checkpoints asked for too late"] += 1
                return self._give_up(src, part.serial)
            self._begin_epoch(target.epoch)
            part.is_frozen, part.target = True, target
            return self._go_on()
        marked = Marked(self.term, self.generation, self._place, part.serial)
        return [Send(src, marked), *self.resend()]

    def _go_on(self) -> list[Send]:
        """Apply the batches that wait and need not any more, and cut if they were the last before that."""
        if self._held is None:
            return []
        model, sends = self._held[0], []
        for src, push in self._batches.ready(self._cutting.may_apply):
            self._promised -= _keys_of(push)
            sends.append(Send(src, self._apply_batch(push, model)))
        part = self._cutting.part
        if part is not None and part.target is not None and self._batches.has_reached(part.target):
            self._cutting.cut(part.serial, model)
            marked = Marked(self.term, self.generation, self._place, part.serial)
            sends += [Send(self._master, marked), *self._go_on()]
        return sends

    @property
    def serial(self) -> int | None:
        """The checkpoint of which pieces are to be handed out; None if there are none."""
        return self._cutting.serial

    @property
    def saving(self) -> int | None:
        """The checkpoint of which pieces are to be handed out or written; None if there are none."""
        return self._cutting.saving

    def next_piece(self, slice_bytes: int) -> Piece | None:
        """Copy about so many bytes of the cut; returns the next piece when it is complete."""
        return self._cutting.next_piece(slice_bytes)

    def piece_written(self, serial: int, files: tuple[FileInfo, ...]) -> list[Send]:
        """A piece of this checkpoint is durable, as these files."""
        self._cutting.written(serial, files)
        return self.resend()

    def write_failed(self, serial: int, reason: str) -> list[Send]:
        """This checkpoint cannot be written."""
        self._cutting.fail(serial, reason)
        return self.resend()

    def resend(self) -> list[Send]:
        """Tell the master what is complete, unless it has noted that; to be done every now and then."""
        part = self._cutting.part
        if part is None or not part.is_complete or part.is_noted:
            return []
        files, updates = tuple(part.files), part.updates or {}
        written = Written(self.generation, self._place, part.serial, files, updates, part.failure)
        return [Send(self._master, written)]

    def release(self) -> bool:
        """Give back a little of the memory of cuts that are over; returns whether there is more to give back."""
        return self._cutting.release()

    # -- restoring from a checkpoint -----------------------------------------------------------------------------------

    @property
    def loading(self) -> Restore | None:
        """What this process is to load; None if nothing."""
        return self._loading.restore if self._loading is not None else None

    def begin_load(self, progress: Progress, updates: dict[str, int]) -> None:
        """The facts of the checkpoint to load: where it stands, and how often each table was updated."""
        assert self._loading is not None  # as `loading` has said
        self._loading.progress = progress
        self._loading.model.begin_load(updates)

    def load(self, piece: Piece) -> None:
        """Take a piece of it.

        Raises:
            CheckpointError: it does not fit into the model; the load has failed then.
            ConfigError: it does not fit into memory; so it has.
        """
        assert self._loading is not None  # as `loading` has said
        needed, room = self._loading.model.load_bytes(piece), self._room()
        if needed > room:
            raise ConfigError(
                f"pserver {self._place} is at its memory limit while it loads a checkpoint: {needed:,} bytes are needed"
                f" and {max(0, int(room)):,} are left; start the job with more --pservers or a larger --memory"
            )
        self._loading.model.load(piece)

    def loaded(self, bytes_read: int, seconds: float) -> list[Send]:
        """All pieces are loaded."""
        assert self._loading is not None  # as `loading` has said
        restore, model, progress = self._loading.restore, self._loading.model, self._loading.progress
        try:
            model.check_loaded()
        except CheckpointError as exc:
            return self.load_failed(str(exc), Obstacle.DAMAGED)
        self._loading, self._loaded = None, Loaded(bytes_read, seconds)
        self._hold(restore, model)
        assert restore.source is not None  # or it would not be loaded
        if restore.source.warm:
            self._version = 0
        else:
            self._version = progress.version
            self._batches.restore(progress)
        return [Send(self._master, self._restored_now())]

    def load_failed(self, reason: str, obstacle: Obstacle) -> list[Send]:
        """The checkpoint cannot be loaded."""
        self._loading, self._loaded = None, Loaded(failure=reason, obstacle=obstacle)
        return [Send(self._master, self._restored_now())]

    # -- trainers ------------------------------------------------------------------------------------------------------

    def _from_trainer(self, src: str, message: OfModel) -> list[Send]:
        """Requests of an older generation are refused; those of a newer one wait, by being sent again."""
        if message.generation < self.generation:
            self.counters["requests of an older generation"] += 1
            return [Send(src, self._stale(message.request))]
        if message.generation > self.generation or self._held is None:
            return []
        answer = self._answer(src, message, *self._held)
        sends = [Send(src, answer)] if answer is not None else []
        return sends + self._go_on() if isinstance(message, PushBatch) else sends

    def _answer(self, src: str, message: OfModel, model: Model, admission: Admission) -> Message | None:
        match message:
            case Pull():
                return self._pull(src, message, model, admission)
            case Push():
                return self._push(message, model, admission)
            case PushBatch():
                return self._push_batch(src, message, model, admission)
            case Where():
                return Here(message.request, self._batches.at.of(message.epoch, message.task))
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
        rows = model.rows(pull.tables, pull.evaluating)
        groups = tuple(model.span(g.group)[g.start : g.stop] for g in pull.groups)
        return Pulled(pull.request, self._version, rows, groups)

    def _push(self, push: Push, model: Model, admission: Admission) -> Message | None:
        if push.step > self._version:
            return None
        if push.step < self._version:
            self.counters["pushes for a committed step"] += 1
            return self._stale(push.request)
        key = (push.task, push.attempt)
        if key in self._staged or self._parts.has(key, push.part):
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
        applied = self._batches.at.of(push.epoch, push.task)
        if self._version == INIT_STEP or push.batch > applied:
            return None
        if push.batch < applied:
            if push.batch + push.batches > applied:
                return self._refused(push.request, _overlaps(push, applied))
            self.counters["repeated pushes"] += 1
            return Pushed(push.request)
        must_wait = not self._cutting.may_apply(push)
        if must_wait and not self._batches.can_wait(src, push):
            return None
        if refusal := self._refuse_part(push, self._version, 1, model, admission):
            return refusal
        whole = self._parts.add((src, push.epoch, push.task, push.batch), push)
        if whole is None:
            return Pushed(push.request)
        if reason := admission.refuse_whole(self._version, whole.groups):
            return self._refused(push.request, reason)
        whole = msgspec.structs.replace(whole, request=push.request)  # the answer is to the part that came last
        if must_wait:
            self._batches.wait(src, whole)
            self._promised += _keys_of(whole)
            return None
        return self._apply_batch(whole, model)

    def _apply_batch(self, push: PushBatch, model: Model) -> Pushed:
        """Apply a whole batch, unless it came twice and was applied."""
        if push.batch == self._batches.at.of(push.epoch, push.task):
            self._begin_epoch(push.epoch)
            model.update([Contribution(1, push.tables, push.groups, push.evict)])
            self._batches.note(push)
            self._parts.forget(lambda key: key[1:3] == (push.epoch, push.task) and key[3] <= push.batch)
        return Pushed(push.request)

    def _begin_epoch(self, epoch: int) -> None:
        if self._batches.begin(epoch):
            self._parts.forget(lambda key: len(key) == 4 and key[1] < epoch)  # of batches; those of steps stay

    def _full(self, push: Push | PushBatch, model: Model) -> Full | None:
        needed, room = model.bytes_needed(self._promised + _keys_of(push)), self._room()
        if needed > room and self._cutting.give_way():
            self.counters["checkpoints given up for lack of memory"] += 1
            room = self._room()
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


def _overlaps(push: PushBatch, applied: int) -> str:
    last = push.batch + push.batches - 1
    return (
        f"a push of batches {push.batch} to {last} of a task of which {applied} are applied; it must go on from there"
    )


def _keys_of(push: Push | PushBatch) -> Counter[int]:
    """How many keys of each table are pushed."""
    return Counter({t.table: t.keys.size for t in push.tables})
