"""The master: takes messages and the time, returns what to send.

It holds no parameter and no sample. What it decides is in the parts: `members` who is there, `script` what a trainer
does next and when a step is complete, `generations` who holds the model, `checkpoints` when these are made, `recording`
what waits for the record. Here is who may say what, and when a generation begins.

First start, resume, a lost pserver and a checkpoint that cannot be read are one thing: when there is a pserver at each
place and they are not those of the present generation, a new generation begins with the newest checkpoint.
"""

from collections import Counter
from math import inf

import msgspec

from evergrad.master.checkpoints import SERIALS, Checkpoints
from evergrad.master.dispatch import AttemptNumbers
from evergrad.master.errands import Errand, Look, ManifestPut, Prune, PutManifest, RecordPut, Result
from evergrad.master.generations import Generations
from evergrad.master.members import Members, MemberState
from evergrad.master.progress import Progress as Shown
from evergrad.master.record import Found, Record
from evergrad.master.recording import Recording
from evergrad.master.schema import difference, refuse_checkpoint
from evergrad.master.script import SLOW_S, Decided, Script
from evergrad.master.training import Now
from evergrad.messages import (
    Abandoned,
    Agree,
    Agreed,
    AnyMessage,
    Ask,
    AskCheckpoint,
    AskLeader,
    AskStatus,
    BreakDone,
    CheckpointSpec,
    Commit,
    Committed,
    Deposed,
    Done,
    Ended,
    Exited,
    Frozen,
    Heartbeat,
    HeartbeatReply,
    HelloReply,
    Join,
    Joined,
    LeaderIs,
    Leave,
    Left,
    Marked,
    Member,
    Message,
    Missing,
    Noted,
    Place,
    Progress,
    PserverAt,
    Refused,
    ReportMetrics,
    Request,
    Restored,
    Role,
    Schema,
    Send,
    Shutdown,
    Source,
    StartAgain,
    Status,
    StopJob,
    Term,
    TrainDone,
    Unknown,
    WantEnd,
    Written,
)

FIRST_TERM = Term(1)
PAUSE_S = 1.0
"""Ticks further apart than this are a pause of the master."""
REPLACE_S = 2.0
"""A process at a place already taken gets it when the one there is silent for so long, and is refused otherwise."""

FromMember = Heartbeat | Leave | Agree | Ask | AskLeader | AskCheckpoint | ReportMetrics
OfCut = Frozen | Marked | Written | Abandoned


class Settings(msgspec.Struct, frozen=True):
    """How a master was started. `url` goes before the script's; `scratch` is for jobs that name none."""

    job: str
    places: int
    lease_s: float
    url: str | None = None
    scratch: str | None = None
    resume: str = "auto"
    keeps_record: bool = False


class Master:
    """One master's state.

    Args:
        settings: how it was started.
        term: this master's term.
        record: what the master before it has decided.

    Invariants:
    1. A member has one open request; asked again under the same id, it gets the same answer.
    2. `failure` is set once, with `is_over`; from then on every request is answered with it.
    3. An answer that follows from a change of the record goes out when the record is written, and no other ask is
       answered before.
    """

    def __init__(self, settings: Settings, term: Term = FIRST_TERM, record: Record | None = None) -> None:
        self.is_over = False
        self.failure: str | None = None
        self.members = Members(settings.lease_s)
        self.counters: Counter[str] = Counter()
        self._settings, self._term = settings, term
        self._numbers = AttemptNumbers(term)
        self._generations = Generations(term)
        self._checkpoints = Checkpoints(None, is_sync=True)
        self._recording = Recording(settings.keeps_record)
        self._schema: Schema | None = None
        self._script: Script | None = None
        self._warm_start: str | None = None
        self._found: Found | None = None
        self._next_serial = 0
        self._reserving: range | None = None
        self._stop_by_s = 0.0
        self._start_again: set[Member] = set()
        self._is_stopping: str | None = None
        self._leader: Member | None = None
        self._finished: set[Member] = set()
        self._waiting: dict[Member, tuple[str, Ask | Agree]] = {}
        self._answered: dict[Member, Message] = {}
        self._held: tuple[Member, Message] | None = None
        self._knocking: dict[Member, float] = {}
        self._errands: list[Errand] = []
        self._shown = Shown()
        self._lost: tuple[str, float] | None = None
        self._ticked_s: float | None = None
        if record is not None:
            self._adopt(record)

    # -- messages ------------------------------------------------------------------------------------------------------

    def handle(self, src: str, message: AnyMessage, now_s: float) -> list[Send]:
        """Deal with one message; returns what to send."""
        answers: list[Message | None] = []
        match message:
            case Join():
                answers = [self._join(message, now_s)]
            case Heartbeat() | Leave() | Agree() | Ask() | AskLeader() | AskCheckpoint() | ReportMetrics():
                answers = [self._from_member(src, message, now_s)]
            case Restored() | Committed() | Missing() if message.generation == self._generations.number:
                self._from_pserver(message, now_s)
            case Frozen() | Marked() | Written() | Abandoned() if message.generation == self._generations.number:
                answers = [self._checkpoints.heard(message, self._term, self._settings.places, now_s)]
            case HelloReply():
                self._generations.heard(message)
            case Deposed() if message.term > self._term:
                self._leave_to(message.term)
            case Exited():
                answers = [self._exited(message, now_s)]
            case AskStatus():
                answers = [self.status(message.request, now_s)]
            case StopJob():
                self._stop(message, now_s)
                answers = [Noted(message.request)]
            case _:
                self.counters["unexpected messages"] += 1
        sends = [Send(src, answer) for answer in answers if answer is not None]
        return sends + self._due(now_s)

    def tick(self, now_s: float) -> list[Send]:
        """Let time pass: leases run out, what was not acknowledged is sent again.

        A tick that comes late shows that this process was paused, in which time it heard nobody.
        """
        if self._ticked_s is not None and now_s - self._ticked_s > PAUSE_S:
            self.members.excuse(now_s - self._ticked_s)
        self._ticked_s = now_s
        self.members.begin_leases(now_s)
        for dead in self.members.silent(now_s):
            self._drop(dead, f"was silent for {now_s - dead.seen_s:.1f} s", now_s)
        sends = self._due(now_s)
        if self.has_ended:
            sends += [Send(p.address, Shutdown(self._term)) for p in self._present()]
        return sends

    def _due(self, now_s: float) -> list[Send]:
        """Everything that can now be answered or told."""
        self._form()
        self._cut(now_s)
        self._record()
        sends = self._answers(now_s)
        if self.is_over:
            return sends
        generations = self._generations
        sends += generations.greet(now_s)
        if generations.pservers is not None:
            sends += generations.pservers.due(now_s)
            if generations.are_restored:
                sends += self._checkpoints.due(self._term, generations.number, generations.at, now_s)
        return sends

    def _answers(self, now_s: float) -> list[Send]:
        """Invariant 3."""
        sends = self._release_held()
        for member, (_, message) in list(self._waiting.items()):
            if self._held is not None or not self._is_recorded:
                break
            answered = self._agree(message) if isinstance(message, Agree) else self._choose(message, now_s)
            if answered is None:
                continue
            self._record()
            self._held = member, answered
            sends += self._release_held()
        return sends

    def _release_held(self) -> list[Send]:
        """Hand the answer held back out, if what it follows from is written."""
        if self._held is None or not self._is_recorded:
            return []
        (member, answer), self._held = self._held, None
        return self._deliver(member, answer)

    def _deliver(self, member: Member, answer: Message) -> list[Send]:
        waiting = self._waiting.get(member)
        if waiting is None or waiting[1].request != _request_of(answer):
            return []
        del self._waiting[member]
        self._answered[member] = answer
        return [Send(waiting[0], answer)]

    # -- members -------------------------------------------------------------------------------------------------------

    def _join(self, join: Join, now_s: float) -> Message | None:
        if self.is_over:
            return Ended(join.request, self.failure)
        if self.members.is_gone(join.member):
            self.counters["messages of former members"] += 1
            return Unknown(join.request)
        if join.member not in self.members:
            if reason := self._refuse_join(join):
                self.counters["refused joins"] += 1
                return Refused(join.request, reason)
            if join.role is Role.PSERVER and not self._takes_place(join, now_s):
                return None
            state = MemberState(join.member, join.role, join.name, join.pid, now_s)
            state.numerics, state.place, state.address = join.numerics, join.place, join.address
            self._shown.note_numerics(state)
            self._shown.unlogged.append(f"{state.name} has joined with pid {state.pid}")
            self.members.add(state)
        self.members.heard(join.member, now_s)
        return Joined(join.request, self._term, self._generations.number, self.members.lease_s)

    def _refuse_join(self, join: Join) -> str | None:
        if join.role is not Role.PSERVER:
            return None
        places = self._settings.places
        if join.place is None or join.address is None or not 0 <= join.place < places:
            return f"this job has pservers 0 to {places - 1}, not {join.place}; start it with another --place"
        there = self.members.pservers().get(join.place)
        came_s = self._knocking.get(join.member)
        if there is not None and came_s is not None and there.seen_s > came_s + REPLACE_S:
            del self._knocking[join.member]
            return f"pserver {join.place} is there already; start this one with another --place"
        return None

    def _takes_place(self, join: Join, now_s: float) -> bool:
        """Whether this process gets its place: one that is there must have fallen silent."""
        assert join.place is not None
        there = self.members.pservers().get(join.place)
        if there is not None and now_s - there.seen_s < REPLACE_S:
            self._knocking.setdefault(join.member, now_s)
            return False
        self._knocking.pop(join.member, None)
        if there is not None:
            self._drop(there, f"was silent for {now_s - there.seen_s:.1f} s and another process took its place", now_s)
        return True

    def _from_member(self, src: str, message: FromMember, now_s: float) -> Message | None:
        state = self.members.heard(message.member, now_s)
        if isinstance(message, Heartbeat):
            if state is not None:
                state.idle_s, state.counters = message.idle_s, message.counters
            known, number = state is not None, self._generations.number
            return HeartbeatReply(message.request, self._term, number, known, self.has_ended, self.failure)
        if isinstance(message, Leave):
            if message.failure is not None and (state is not None or self.members.is_gone(message.member)):
                name = state.name if state is not None else message.member
                self.end(f"in {name} the script {message.failure}")
            if state is not None:
                self._drop(state, "said goodbye", now_s)
            return Left(message.request)
        if state is None:
            return Ended(message.request, self.failure) if self.has_ended else Unknown(message.request)
        match message:
            case AskLeader():
                return LeaderIs(message.request, self._leads(message.member))
            case AskCheckpoint():
                self._checkpoints.is_asked = True
                return Noted(message.request)
            case ReportMetrics():
                self._shown.report(message.epoch, message.metrics)
                self._checkpoints.rate(message.epoch, message.best)
                return Noted(message.request)
            case Agree() | Ask():
                return self._open_request(src, message, now_s)

    def _open_request(self, src: str, message: Ask | Agree, now_s: float) -> Message | None:
        """Invariant 1. What is answered later waits; `_answers` answers it."""
        answered = self._answered.get(message.member)
        if answered is not None and message.request <= _request_of(answered):
            self.counters["repeated requests"] += 1
            return answered if message.request == _request_of(answered) else None
        waiting = self._waiting.get(message.member)
        if waiting is not None and message.request <= waiting[1].request:
            return None
        if isinstance(message, Ask):
            if message.done is not None:
                self._done(message.done, now_s)
            self._release(message.member)
        self._waiting[message.member] = src, message
        return None

    def _exited(self, message: Exited, now_s: float) -> Message:
        state = self.members.named(message.name, message.pid)
        if state is not None:
            self._drop(state, "has ended", now_s)
        return Noted(message.request)

    def _drop(self, state: MemberState, reason: str, now_s: float) -> None:
        """A member is gone: what it held goes to others; a pserver's part of the model to the next at its place."""
        self.members.remove(state.member)
        self._release(state.member)
        self._waiting.pop(state.member, None)
        self._answered.pop(state.member, None)
        self._finished.discard(state.member)
        if self.is_over:
            return
        self._shown.note_event(f"{state.name} {reason}")
        if state.role is Role.PSERVER and self._generations.at:
            self._lost = self._lost or (state.name, now_s)
            if self._checkpoints.spec is None:
                self.end(
                    f"{state.name} is lost ({reason}) and its parameters with it, and there are no checkpoints to fall"
                    " back to; start the job with --checkpoints"
                )
        elif state.role is Role.TRAINER:
            self._end_if_finished()

    def _release(self, member: Member) -> None:
        if self._script is not None:
            self._script.release(member)

    def _present(self) -> tuple[PserverAt, ...]:
        pservers = sorted(self.members.pservers().items())
        return tuple(PserverAt(place, p.member, p.address) for place, p in pservers if p.address is not None)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _agree(self, message: Agree) -> Message | None:
        """The first trainer's model is the job's; the others must have the same."""
        if self.is_over:
            return Ended(message.request, self.failure)
        if self._schema is None:
            self._settle(message)
        elif reason := difference(self._schema, message.schema):
            self.counters["refused models"] += 1
            return Refused(message.request, reason)
        self._shown.note_initial(self.members[message.member].name, message.initial)
        if (found := self._found) is not None and (reason := self._refuse_found(found)):
            return Refused(message.request, reason)
        if not self._generations.are_restored:
            return None
        return Agreed(message.request, self._term, self._generations.number, self._generations.at)

    def _settle(self, message: Agree) -> None:
        """Take the first trainer's model, and look what there is to begin with."""
        self._schema, self._warm_start = message.schema, message.warm_start
        spec, settings = message.checkpoints, self._settings
        url = settings.url or (spec.url if spec is not None else None)
        self._scratch_or(url, spec)
        self._script = Script(message.schema.update, self._numbers, self._checkpoints.covers)
        if url is None and message.warm_start is None and settings.resume in ("auto", "never"):
            self._found = Found()
        else:
            self._errands.append(Look(url, settings.resume, message.warm_start))
        self._form()

    def _scratch_or(self, url: str | None, spec: CheckpointSpec | None) -> None:
        where = url or self._settings.scratch
        is_sync = self._schema is not None and self._schema.update.is_sync
        if where is not None:
            spec = msgspec.structs.replace(spec, url=where) if spec is not None else CheckpointSpec(where)
            self._checkpoints = Checkpoints(spec, is_sync)

    def _refuse_found(self, found: Found) -> str | None:
        if found.failure is not None:
            return found.failure
        if found.schema is None or found.source is None or self._schema is None:
            return None
        return refuse_checkpoint(
            found.schema, self._schema, f"{found.source.url} {found.source.serial}", found.source.warm
        )

    # -- generations ---------------------------------------------------------------------------------------------------

    def _form(self) -> None:
        """Begin, start or take over a generation when its time has come."""
        generations, present = self._generations, self._present()
        if self.is_over or self._script is None or self._found is None or len(present) < self._settings.places:
            return
        if self._refuse_found(self._found):
            return
        if present != generations.at:
            self._begin(present)
        elif (found := generations.found()) is not None and self._schema is not None:
            if found.is_whole(generations.number):
                version, standing = found.version, found.standing(self._script.begun.epoch)
                self._script.resume(version, standing)
                generations.go_on(self._schema, found, found.last_commit if self._schema.update.is_sync else None)
                self._shown.note_event(f"this master goes on at version {version} in term {self._term}")
            else:
                self._begin(present)
        if generations.is_to_start and self._is_recorded and self._schema is not None:
            generations.start(self._schema)

    def _begin(self, present: tuple[PserverAt, ...]) -> None:
        """A generation begins with the newest checkpoint there is, else with what the job began with."""
        assert self._script is not None
        assert self._found is not None
        durable = self._checkpoints.durable
        spec = self._checkpoints.spec
        source, progress = self._found.source, self._found.progress if self._found.source is not None else None
        if durable and spec is not None:
            source, progress = Source(spec.url, durable[-1].serial), durable[-1].progress
        if not _reaches(progress, self._script.passed):
            self._start_again = {t.member for t in self.members.trainers()}
        self._checkpoints.fall_back()
        self._script.restore(progress)
        self._generations.begin(present, source)

    def _from_pserver(self, message: Restored | Committed | Missing, now_s: float) -> None:
        pservers = self._generations.pservers
        if pservers is None:
            return
        match message:
            case Restored(failure=str(failure)):
                self._cannot_restore(failure)
            case Restored():
                had = pservers.are_restored
                pservers.restored(message)
                if pservers.are_restored and not had:
                    self._note_restored(now_s)
            case Committed():
                pservers.committed(message)
            case Missing():
                self._lacks(message, now_s)

    def _lacks(self, missing: Missing, now_s: float) -> None:
        """What cannot be: nothing is applied of the step, and the job falls back."""
        what = f"pserver {missing.place} lacks a push that step {missing.step} names; please report this bug"
        if self._checkpoints.spec is None:
            self.end(what)
            return
        self._lost = self._lost or (f"a push at pserver {missing.place}", now_s)
        self._shown.note_event(what)
        self._begin(self._generations.at)

    def _cannot_restore(self, failure: str) -> None:
        """The checkpoint is given up for the one before it."""
        source = self._generations.source
        is_own = source is not None and any(d.serial == source.serial for d in self._checkpoints.durable)
        self._shown.note_event(f"a checkpoint could not be restored: {failure}")
        if source is None or not is_own or len(self._checkpoints.durable) == 1:
            self.end(f"the checkpoint to begin with cannot be restored: {failure}")
            return
        self._checkpoints.forget(source.serial)
        self._begin(self._generations.at)

    def _note_restored(self, now_s: float) -> None:
        generations = self._generations
        if generations.source is None or generations.pservers is None:
            self._lost = None
            return
        loaded = list(generations.pservers.loaded.values())
        rows, size = sum(sum(r.rows) for r in loaded), sum(r.bytes_read for r in loaded)
        slowest = max(r.seconds for r in loaded)
        after = f"; {now_s - self._lost[1]:.1f} s after {self._lost[0]} was lost" if self._lost else ""
        self._lost = None
        self._shown.note_event(
            f"generation {generations.number} begins with checkpoint {generations.source.serial}: {rows:,} rows,"
            f" {size / 1e6:,.1f} MB, loaded in {slowest:.1f} s{after}"
        )

    # -- the script ----------------------------------------------------------------------------------------------------

    def _done(self, done: Done, now_s: float) -> None:
        """Take a report; one of an older generation is void."""
        script = self._script
        is_void = not isinstance(done, BreakDone) and done.generation != self._generations.number
        if script is None or is_void or not self._generations.are_restored:
            return
        if isinstance(done, TrainDone):
            samples, decided = script.initial_or_step(done, now_s)
            if samples:
                self._shown.trained(script.training.number, samples, done.metrics, now_s)
            if decided is not None:
                self._commit(decided, now_s)
            return
        if isinstance(done, BreakDone) and done.last is not None:
            self._done(done.last, now_s)
        script.take(done)

    def _commit(self, decided: Decided, now_s: float) -> None:
        """Tell the pservers; a checkpoint that is due rides in the commit."""
        pservers, script = self._generations.pservers, self._script
        assert pservers is not None
        assert script is not None
        serial, progress = None, script.progress()
        if progress is not None and self._checkpoints.wants(progress, script.steps, script.is_idle, now_s):
            serial = self._checkpoints.begin(progress, script.steps, script.is_idle, now_s)
        pservers.commit(Commit(self._term, self._generations.number, decided.step, decided.chosen, serial))

    def _choose(self, ask: Ask, now_s: float) -> Message | None:
        """The answer to an ask, or None while there is none: it waits."""
        if self.is_over:
            return Ended(ask.request, self.failure)
        if ask.member in self._start_again:
            return StartAgain(ask.request)
        if isinstance(ask.want, WantEnd):
            return self._finish(ask)
        if self._script is None:
            return Unknown(ask.request)
        if not self._generations.are_restored or self._is_stopping is not None:
            return None
        now = Now(now_s, ask.request, self._term, self._generations.number)
        return self._script.next(ask, ask.want, now, self._leads)

    def _leads(self, member: Member) -> bool:
        """Whether this trainer is the leader; where there is none it becomes it."""
        if self._leader is None or self._leader not in self.members:
            self._leader = member
        return self._leader == member

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _cut(self, now_s: float) -> None:
        """Begin the cuts that no commit carries, and finish those that are written."""
        checkpoints, script, generations = self._checkpoints, self._script, self._generations
        self._take_notes()
        if self.is_over or script is None or generations.pservers is None or not generations.are_restored:
            return
        progress = script.progress()
        is_still = script.is_idle or self._is_stopping is not None
        if progress is not None and (is_still or not checkpoints.is_sync) and generations.pservers.have_acknowledged:
            if checkpoints.wants(progress, script.steps, is_still, now_s):
                checkpoints.begin(progress, script.steps, is_still, now_s)
            elif self._is_stopping is not None and (checkpoints.covers(progress) or now_s > self._stop_by_s):
                self.end(self._is_stopping)
        complete = checkpoints.take_complete(self._settings.places)
        if complete is not None and checkpoints.spec is not None and self._schema is not None:
            self._errands.append(
                PutManifest(
                    checkpoints.spec.url, self._settings.job, self._schema, self._settings.places,
                    generations.number, complete, self._shown.reported,
                )
            )  # fmt: skip
        self._end_if_finished()

    def _take_notes(self) -> None:
        for note in self._checkpoints.take_notes():
            self._shown.note_event(note)

    def take_errands(self) -> list[Errand]:
        """What the process is to do now; each is answered by `done`, in whatever order."""
        errands, self._errands = self._errands, []
        return errands

    def done(self, result: Result, now_s: float) -> list[Send]:
        """An errand is done; returns what to send."""
        match result:
            case Found():
                self._found, self._next_serial = result, max(self._next_serial, result.next_serial)
                self._checkpoints.durable = list(result.durable)
            case ManifestPut():
                if self._checkpoints.put(result.serial, result.failure, now_s):
                    self._prune()
            case RecordPut():
                self._recording.put(result.number)
            case _:
                if result.failure is not None:
                    self._shown.note_event(f"old checkpoints could not be removed: {result.failure}")
        return self._due(now_s)

    def _prune(self) -> None:
        """Remove what is kept no longer."""
        checkpoints, source = self._checkpoints, self._generations.source
        if checkpoints.spec is None:
            return
        keep = checkpoints.to_keep(source.serial if source is not None else None)
        remove = tuple(d.serial for d in checkpoints.durable if d.serial not in keep)
        for serial in remove:
            checkpoints.forget(serial)
        self._errands.append(Prune(checkpoints.spec.url, remove, before=max(keep, default=0)))

    # -- the record ----------------------------------------------------------------------------------------------------

    @property
    def _is_recorded(self) -> bool:
        """Whether what answers follow from is written."""
        return self._recording.has(self._facts(), 0)

    def _facts(self) -> tuple[object, object]:
        """What the record says, in short: what asks wait for, and the rest."""
        script, durable = self._script, self._checkpoints.durable
        of_script = script.facts() if script is not None else None
        needed = (self._term, self._generations.number, self._generations.at, of_script, self.is_over)
        return needed, (self._next_serial, tuple((d.serial, d.best) for d in durable))

    def _record(self) -> None:
        """Have the record written if it has changed; serials are used when it says that they are taken."""
        if self._checkpoints.needs_serials and self._found is not None and self._reserving is None:
            self._reserving = range(self._next_serial, self._next_serial + SERIALS)
            self._next_serial += SERIALS
        errand = self._recording.write(self._facts(), self._make_record)
        if errand is not None:
            self._errands.append(errand)
        if self._reserving is not None and self._recording.has(self._facts(), 1):
            self._checkpoints.serials, self._reserving = self._reserving, None

    def _make_record(self) -> Record:
        generations, script = self._generations, self._script
        evaluations, savings = script.calls_done() if script is not None else ((), ())
        return Record(
            job=self._settings.job,
            term=self._term,
            generation=generations.number,
            schema=self._schema,
            spec=self._checkpoints.spec,
            found=self._found,
            source=generations.source,
            pservers=generations.at,
            names=tuple((m.name, m.pid) for p in generations.at if (m := self.members.find(p.member)) is not None),
            next_serial=self._next_serial,
            durable=tuple(self._checkpoints.durable),
            progress=script.begun if script is not None else Progress(),
            passed=script.passed if script is not None else -1,
            epochs=script.epochs if script is not None else 0,
            evaluations=evaluations,
            savings=savings,
            reported=self._shown.reported,
            ended=self.is_over,
            failure=self.failure,
        )

    def _adopt(self, record: Record) -> None:
        """Take over from the master before."""
        self._schema, self._found, self._next_serial = record.schema, record.found, record.next_serial
        self._shown.reported = dict(record.reported)
        if record.ended:
            self.end(record.failure)
        if record.schema is None:
            return
        is_sync = record.schema.update.is_sync
        self._checkpoints = Checkpoints(record.spec, is_sync, record.durable)
        self._script = Script(record.schema.update, self._numbers, self._checkpoints.covers)
        self._script.adopt(record)
        self._generations.adopt(record)
        for p, (name, pid) in zip(record.pservers, record.names, strict=True):
            self.members.add(MemberState(p.member, Role.PSERVER, name, pid, inf, place=p.place, address=p.address))

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the job is over and the record says so."""
        return self.is_over and self._is_recorded

    def _finish(self, ask: Ask) -> Message | None:
        self._finished.add(ask.member)
        self._end_if_finished()
        return Ended(ask.request, self.failure) if self.is_over else None

    def _end_if_finished(self) -> None:
        """Success: every trainer's script is at its end, and the last step is applied and in a checkpoint."""
        trainers, pservers = self.members.trainers(), self._generations.pservers
        if not self._finished or any(t.member not in self._finished for t in trainers):
            return
        if pservers is not None and not (pservers.are_restored and pservers.have_acknowledged):
            return
        progress = self._script.progress() if self._script is not None else None
        if progress is None or self._checkpoints.covers(progress):
            self.end(None)

    def _stop(self, message: StopJob, now_s: float) -> None:
        """Somebody has the job end: at once, or after one more checkpoint."""
        if message.grace_s is None or self._checkpoints.spec is None or not self._generations.are_restored:
            self.end(message.failure)
        elif self._is_stopping is None:
            self._is_stopping, self._stop_by_s = message.failure or "it was stopped", now_s + message.grace_s

    def _leave_to(self, term: Term) -> None:
        self.end(f"a newer master leads this job (term {term})")

    def end(self, failure: str | None) -> None:
        """The job is over, with success if `failure` is None."""
        if not self.is_over:
            self.is_over, self.failure = True, failure
            self._shown.unlogged.append("the job is over" if failure is None else f"the job has failed: {failure}")

    def take_events(self) -> list[str]:
        """What has happened since the last call, for the log."""
        events, self._shown.unlogged = self._shown.unlogged, []
        return events

    # -- status --------------------------------------------------------------------------------------------------------

    def status(self, request: Request, now_s: float) -> Status:
        """How the job goes."""
        training = self._script.training if self._script is not None else None
        epoch = training.epoch if training is not None else None
        return Status(
            request=request,
            job=self._settings.job,
            phase=self._phase(),
            waiting_for=self._waiting_for(now_s),
            epoch=training.number if training is not None else -1,
            epochs=self._script.epochs if self._script is not None else 0,
            step=epoch.step if epoch is not None else 0,
            steps=epoch.steps if epoch is not None else 0,
            version=training.version if training is not None else 0,
            samples=self._shown.samples,
            samples_per_s=self._shown.samples_per_s(now_s),
            live=self._shown.live(),
            reported=self._shown.reported,
            members=self.members.status(now_s, self._doing),
            counters=dict(self.counters + self.members.counters()),
            notes=tuple(self._shown.notes),
            ended=self.has_ended,
            failure=self.failure,
        )

    def _phase(self) -> str:
        if self.is_over:
            return "ended"
        if self._schema is None:
            return "forming"
        if not self._generations.are_restored:
            return "restoring"
        if self._script is not None and not self._script.training.is_idle:
            return "training"
        return "between epochs"

    def _waiting_for(self, now_s: float) -> str:
        if self.is_over:
            return "" if self.has_ended else "the record to be written"
        places = self._settings.places
        missing = [str(p) for p in range(places) if Place(p) not in self.members.pservers()]
        if missing:
            return f"pserver {', '.join(missing)} of {places} to join"
        if greeted := self._generations.waits_for():
            return f"pserver {greeted[0]} to say where it stands"
        if not self.members.trainers():
            return "a trainer to join"
        if not self._is_recorded:
            return "the record to be written"
        if self._script is not None and self._found is None:
            return "the checkpoints to be looked through"
        pservers = self._generations.pservers
        if pservers is not None and (told := pservers.waits_for(now_s - SLOW_S)):
            return f"pserver {told[0]} to acknowledge what it was told"
        slow = self._script.slow_task(now_s) if self._script is not None else None
        if slow is None:
            return self._checkpoints.waits_for(self._generations.at) if self._is_at_a_gate() else ""
        index, member, since_s = slow
        name = self.members[member].name if member in self.members else "nobody"
        return f"task {index} at {name} for {since_s:.0f} s"

    def _is_at_a_gate(self) -> bool:
        progress = self._script.progress() if self._script is not None and self._script.is_idle else None
        return progress is not None and not self._checkpoints.covers(progress)

    def _doing(self, member: Member) -> str:
        if member in self._finished:
            return "finished"
        return self._script.doing.get(member, "") if self._script is not None else ""


def _reaches(progress: Progress | None, passed: int) -> bool:
    """Whether scripts that are past this epoch's batches need not go back."""
    if passed < 0:
        return True
    return progress is not None and (progress.epoch, progress.is_closed) >= (passed, True)


def _request_of(answer: Message) -> Request:
    request: Request = answer.request  # type: ignore[attr-defined]  # every answer has one
    return request
