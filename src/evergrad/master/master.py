"""The master: takes messages and the time, returns what to send.

It holds no parameter and no sample. What it decides is in the parts: `members` who is there, `script` what a trainer
does next and when a step is complete, `pservers` what they still have to acknowledge. Here is who may say what.
"""

from collections import Counter

from evergrad.master.dispatch import AttemptNumbers
from evergrad.master.failures import MAX_FAILURES, Failures
from evergrad.master.members import Members, MemberState
from evergrad.master.pace import Behind
from evergrad.master.progress import Progress
from evergrad.master.pservers import Pservers
from evergrad.master.schema import difference
from evergrad.master.script import SLOW_S, Decided, Script
from evergrad.master.training import Now
from evergrad.messages import (
    Agree,
    Agreed,
    AnyMessage,
    Ask,
    AskLeader,
    AskStatus,
    BreakDone,
    CloseEpoch,
    Commit,
    Committed,
    Deposed,
    Done,
    Ended,
    EpochClosed,
    Exited,
    Generation,
    Heartbeat,
    HeartbeatReply,
    Join,
    Joined,
    LeaderIs,
    Leave,
    Left,
    MayBegin,
    Member,
    Message,
    Missing,
    Noted,
    Place,
    PserverAt,
    Raised,
    Refused,
    ReportMetrics,
    Request,
    Restored,
    Role,
    Schema,
    Send,
    Shutdown,
    Status,
    StopJob,
    Term,
    TrainDone,
    Unknown,
    WantBatch,
    WantEnd,
)

FIRST_TERM = Term(1)
PAUSE_S = 1.0
"""Ticks further apart than this are a pause of the master."""
SILENT_S = 2.0
"""A pserver not heard of for longer is shown as waited for."""

FromMember = Heartbeat | Leave | Agree | Ask | MayBegin | AskLeader | ReportMetrics


class Master:
    """One master's state.

    Args:
        job: the job's name.
        pservers: how many places there are.
        lease_s: silence after which a member counts as dead.
        term: this master's term.
        max_failures: how many attempts at a task may fail.

    Invariants:
    1. A member has one open request; asked again under the same id, it gets the same answer. Whether it may begin
       another batch it asks besides, and is answered by what holds then.
    2. `failure` is set once, with `is_over`; from then on every request is answered with it.
    """

    def __init__(
        self,
        job: str,
        pservers: int,
        lease_s: float,
        term: Term = FIRST_TERM,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self.is_over = False
        self.failure: str | None = None
        self.members = Members(lease_s)
        self.counters: Counter[str] = Counter()
        self._job = job
        self._places = pservers
        self._term = term
        self._generation = Generation(0)
        self._numbers = AttemptNumbers(term)
        self._schema: Schema | None = None
        self._pservers: Pservers | None = None
        self._script: Script | None = None
        self._leader: Member | None = None
        self._finished: set[Member] = set()
        self._waiting: dict[Member, tuple[str, Ask | Agree]] = {}
        self._answered: dict[Member, Message] = {}
        self._pausing: dict[Member, tuple[str, MayBegin, float]] = {}
        self._progress = Progress()
        self._failures = Failures(max_failures)
        self._ticked_s: float | None = None

    # -- messages ------------------------------------------------------------------------------------------------------

    def handle(self, src: str, message: AnyMessage, now_s: float) -> list[Send]:
        """Deal with one message; returns what to send."""
        answer: Message | None = None
        match message:
            case Join():
                answer = self._join(message, now_s)
            case Heartbeat() | Leave() | Agree() | Ask() | MayBegin() | AskLeader() | ReportMetrics():
                answer = self._from_member(src, message, now_s)
            case Restored():
                if self._pservers is not None and message.generation == self._generation:
                    self._pservers.restored(message)
            case Committed():
                if self._pservers is not None and message.generation == self._generation:
                    self._pservers.committed(message)
            case EpochClosed():
                if self._pservers is not None and message.generation == self._generation:
                    self._closed(self._pservers, message)
            case Missing() if message.generation == self._generation:
                self.end(f"pserver {message.place} lacks a push that step {message.step} names; please report this bug")
            case Deposed() if message.term > self._term:
                self.end(f"a newer master leads this job (term {message.term})")
            case Exited():
                answer = self._exited(message)
            case AskStatus():
                answer = self.status(message.request, now_s)
            case StopJob():
                self.end(message.failure)
                answer = Noted(message.request)
            case _:
                self.counters["unexpected messages"] += 1
        sends = [Send(src, answer)] if answer is not None else []
        return sends + self._due(now_s)

    def tick(self, now_s: float) -> list[Send]:
        """Let time pass: leases run out, what was not acknowledged is sent again.

        A tick that comes late shows that this process was paused, in which time it heard nobody.
        """
        if self._ticked_s is not None and now_s - self._ticked_s > PAUSE_S:
            self.members.excuse(now_s - self._ticked_s, now_s)
            if self._script is not None:
                self._script.training.excuse(now_s - self._ticked_s)
        self._ticked_s = now_s
        for dead in self.members.silent(now_s):
            self._drop(dead, f"was silent for {now_s - dead.seen_s:.1f} s")
        sends = self._due(now_s)
        if self.is_over:
            sends += [Send(p.address, Shutdown(self._term)) for p in self._present()]
        return sends

    def _due(self, now_s: float) -> list[Send]:
        """Everything that can now be decided and answered, and what the pservers have not acknowledged."""
        sends = []
        if self._script is not None:
            self._decide(self._script, now_s)
        for member, (src, message) in list(self._waiting.items()):
            answer = self._agree(message) if isinstance(message, Agree) else self._choose(message, now_s)
            if answer is not None:
                del self._waiting[member]
                self._answered[member] = answer
                self.members[member].answered_s = now_s
                sends.append(Send(src, answer))
        if self._script is not None:
            sends += self._let_begin(self._script)
        if self._pservers is not None and not self.is_over:
            sends += self._pservers.due(now_s)
        return sends

    def _decide(self, script: Script, now_s: float) -> None:
        """The commit of the present step, and the end of an epoch, once they wait for nothing more."""
        if self.is_over:
            return
        if (decided := script.decide(now_s)) is not None:
            self._progress.drop(decided.dropped)
            self._commit(decided)
        if (epoch := script.training.over()) is not None:
            assert self._pservers is not None
            self._pservers.tell(CloseEpoch(self._term, self._generation, epoch))

    def _closed(self, pservers: Pservers, message: EpochClosed) -> None:
        pservers.closed(message)
        if self._script is not None and pservers.have_acknowledged:
            self._script.training.settle()

    def _let_begin(self, script: Script) -> list[Send]:
        """Answers to those who wait for a slower trainer, or whose task counts no more."""
        sends = []
        script.settle()
        for member, (src, ask, _) in list(self._pausing.items()):
            if (answer := self._may_begin(script, ask)) is not None:
                del self._pausing[member]
                sends.append(Send(src, answer))
        return sends

    # -- members -------------------------------------------------------------------------------------------------------

    def _join(self, join: Join, now_s: float) -> Message:
        if self.is_over:
            return Ended(join.request, self.failure)
        if self.members.is_gone(join.member):
            self.counters["messages of former members"] += 1
            return Unknown(join.request)
        if join.member not in self.members:
            if reason := self._refuse_join(join):
                self.counters["refused joins"] += 1
                return Refused(join.request, reason)
            state = MemberState(join.member, join.role, join.name, join.pid, now_s, answered_s=now_s)
            state.numerics, state.place, state.address = join.numerics, join.place, join.address
            self._progress.note_numerics(state)
            self._progress.unlogged.append(f"{state.name} has joined with pid {state.pid}")
            self.members.add(state)
        self.members.heard(join.member, now_s)
        return Joined(join.request, self._term, self._generation, self.members.lease_s)

    def _refuse_join(self, join: Join) -> str | None:
        if join.role is not Role.PSERVER:
            return None
        if join.place is None or join.address is None or not 0 <= join.place < self._places:
            return f"this job has pservers 0 to {self._places - 1}, not {join.place}; start it with another --place"
        if join.place in self.members.pservers():
            return f"pserver {join.place} is there already; start this one with another --place"
        return None

    def _from_member(self, src: str, message: FromMember, now_s: float) -> Message | None:
        state = self.members.heard(message.member, now_s)
        if isinstance(message, Heartbeat):
            if state is not None:
                state.idle_s, state.counters = message.idle_s, message.counters
            known = state is not None
            return HeartbeatReply(message.request, self._term, self._generation, known, self.is_over, self.failure)
        if isinstance(message, Leave):
            if message.failure is not None and (state is not None or self.members.is_gone(message.member)):
                self._failed(state.name if state is not None else message.member, message.failure, message.raised)
            if state is not None:
                self._drop(state, "said goodbye")
            return Left(message.request)
        if state is None:
            return Ended(message.request, self.failure) if self.is_over else Unknown(message.request)
        match message:
            case AskLeader():
                return LeaderIs(message.request, self._leads(message.member))
            case ReportMetrics():
                self._progress.report(message.epoch, message.metrics)
                return Noted(message.request)
            case MayBegin():
                return self._ask_to_begin(src, message, now_s)
            case Agree() | Ask():
                return self._open_request(src, message, now_s)

    def _open_request(self, src: str, message: Ask | Agree, now_s: float) -> Message | None:
        """Invariant 1. What is answered later waits; `_due` answers it."""
        answered = self._answered.get(message.member)
        if answered is not None and message.request <= _request_of(answered):
            self.counters["repeated requests"] += 1
            return answered if message.request == _request_of(answered) else None
        waiting = self._waiting.get(message.member)
        if waiting is not None and message.request <= waiting[1].request:
            return None
        self._pausing.pop(message.member, None)
        if isinstance(message, Ask):
            if message.done is not None:
                self._done(message.done, now_s)
            self._release(message.member)
        self._waiting[message.member] = src, message
        return None

    def _ask_to_begin(self, src: str, message: MayBegin, now_s: float) -> Message | None:
        """What it tells of its own batches may let others begin; `_due` answers them."""
        if self._script is None:
            return Unknown(message.request)
        waiting = self._pausing.get(message.member)
        if waiting is not None and message.request < waiting[1].request:
            return None
        answer = self._may_begin(self._script, message)
        if answer is None:
            self._pausing[message.member] = src, message, waiting[2] if waiting is not None else now_s
        else:
            self._pausing.pop(message.member, None)
        return answer

    def _may_begin(self, script: Script, ask: MayBegin) -> Message | None:
        return Ended(ask.request, self.failure) if self.is_over else script.may_begin(ask)

    def _failed(self, name: str, failure: str, raised: Raised | None) -> None:
        """A trainer's script has raised: in a task, which others try then, or elsewhere, which ends the job."""
        if raised is None:
            self.end(f"in {name} the script {failure}")
            return
        script = self._script
        if script is None or raised.generation != self._generation:
            return
        failed = script.failed(raised)
        if failed is None:
            return
        if self._failures.is_last(failed):
            script.set_aside(failed)
        reason = self._failures.note(failed, raised.error)
        self._progress.note_event(
            f"in {name} the script raised {raised.error} in {failed.where} ({self._failures.words(failed)})"
        )
        self._progress.unlogged.append(f"in {name} the script {failure}")
        if reason is not None:
            self.end(f"{reason}; the last time, in {name}, it {failure}")

    def _exited(self, message: Exited) -> Message:
        state = self.members.named(message.name, message.pid)
        if state is not None:
            self._drop(state, "has ended")
        return Noted(message.request)

    def _drop(self, state: MemberState, reason: str) -> None:
        """A member is gone: what it held goes to others."""
        self.members.remove(state.member)
        self._release(state.member)
        self._waiting.pop(state.member, None)
        self._answered.pop(state.member, None)
        self._pausing.pop(state.member, None)
        self._finished.discard(state.member)
        if self.is_over:
            return
        self._progress.note_event(f"{state.name} {reason}")
        if state.role is Role.PSERVER and self._pservers is not None:
            self.end(
                f"{state.name} is lost ({reason}) and its parameters with it: this version writes no checkpoints to"
                " fall back to; start the job again"
            )
        elif state.role is Role.TRAINER:
            self._end_if_finished()

    def _release(self, member: Member) -> None:
        if self._script is not None:
            self._script.release(member)

    def _present(self) -> list[PserverAt]:
        pservers = sorted(self.members.pservers().items())
        return [PserverAt(place, p.member, p.address) for place, p in pservers if p.address is not None]

    # -- the model -----------------------------------------------------------------------------------------------------

    def _agree(self, message: Agree) -> Message | None:
        """The first trainer's model is the job's; the others must have the same."""
        if self.is_over:
            return Ended(message.request, self.failure)
        if self._schema is None:
            self._schema = message.schema
            if message.schema.update.keep_inner_state:
                self._progress.note_event(
                    "trainers keep their inner optimizers' state (keep_inner_state), so what is trained depends on who"
                    " computes what: the same bits cannot be promised"
                )
        elif reason := difference(self._schema, message.schema):
            self.counters["refused models"] += 1
            return Refused(message.request, reason)
        self._progress.note_initial(self.members[message.member].name, message.initial)
        if self._pservers is None:
            if len(present := self._present()) < self._places:
                return None
            self._generation = Generation(self._generation + 1)
            self._pservers = Pservers(self._term, self._generation, tuple(present), self._schema)
            self._script = Script(self._schema.update, self._numbers)
        if not self._pservers.are_restored:
            return None
        return Agreed(message.request, self._term, self._generation, self._pservers.at)

    # -- the script ----------------------------------------------------------------------------------------------------

    def _done(self, done: Done, now_s: float) -> None:
        """Take a report; one of an older generation is void."""
        script = self._script
        if script is None or (not isinstance(done, BreakDone) and done.generation != self._generation):
            return
        if isinstance(done, TrainDone):
            if (decided := script.initial(done)) is not None:
                self._commit(decided)
            elif samples := script.trained(done, now_s):
                self._progress.trained(script.training.number, samples, done.metrics, now_s)
                self._failures.done()
                self._decide(script, now_s)
            return
        if isinstance(done, BreakDone) and done.last is not None:
            self._done(done.last, now_s)
        script.take(done)

    def _commit(self, decided: Decided) -> None:
        assert self._pservers is not None
        self._pservers.tell(Commit(self._term, self._generation, decided.step, decided.chosen, None))

    def _choose(self, ask: Ask, now_s: float) -> Message | None:
        """The answer to an ask, or None while there is none: it waits."""
        if self.is_over:
            return Ended(ask.request, self.failure)
        if isinstance(ask.want, WantEnd):
            return self._finish(ask)
        if self._script is None:
            return Unknown(ask.request)
        if isinstance(ask.want, WantBatch) and self._pservers is not None and self._pservers.are_behind:
            return None
        now = Now(now_s, ask.request, self._term, self._generation)
        return self._script.next(ask, ask.want, now, self._leads)

    def _leads(self, member: Member) -> bool:
        """Whether this trainer is the leader; where there is none it becomes it."""
        if self._leader is None or self._leader not in self.members:
            self._leader = member
        return self._leader == member

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, ask: Ask) -> Message | None:
        self._finished.add(ask.member)
        self._end_if_finished()
        return Ended(ask.request, self.failure) if self.is_over else None

    def _end_if_finished(self) -> None:
        """Every trainer's script is at its end, and every pserver has applied the last step.

        That is success unless tasks were set aside.
        """
        trainers = self.members.trainers()
        is_applied = self._pservers is None or self._pservers.have_acknowledged
        if self._finished and is_applied and all(t.member in self._finished for t in trainers):
            self.end(self._failures.summary())

    def end(self, failure: str | None) -> None:
        """The job is over, with success if `failure` is None."""
        if not self.is_over:
            self.is_over, self.failure = True, failure
            self._progress.unlogged.append("the job is over" if failure is None else f"the job has failed: {failure}")

    def take_events(self) -> list[str]:
        """What has happened since the last call, for the log."""
        events, self._progress.unlogged = self._progress.unlogged, []
        return events

    # -- status --------------------------------------------------------------------------------------------------------

    def status(self, request: Request, now_s: float) -> Status:
        """How the job goes."""
        training = self._script.training if self._script is not None else None
        epoch = training.epoch if training is not None else None
        return Status(
            request=request,
            job=self._job,
            phase=self._phase(),
            waiting_for=self._waiting_for(now_s),
            epoch=training.number if training is not None else -1,
            epochs=self._script.epochs if self._script is not None else 0,
            step=epoch.step if epoch is not None else 0,
            steps=epoch.steps if epoch is not None else 0,
            version=training.version if training is not None else 0,
            samples=self._progress.samples,
            samples_per_s=self._progress.samples_per_s(now_s),
            live=self._progress.live(),
            reported=self._progress.reported,
            members=self.members.status(now_s, self._doing),
            counters=dict(self.counters + self.members.counters()),
            notes=tuple(self._progress.notes),
            ended=self.is_over,
            failure=self.failure,
            dropped=self._progress.dropped,
            set_aside=tuple(self._failures.set_aside),
        )

    def _phase(self) -> str:
        if self.is_over:
            return "ended"
        if self._schema is None:
            return "forming"
        if self._pservers is None or not self._pservers.are_restored:
            return "restoring"
        return self._script.phase() if self._script is not None else "restoring"

    def _waiting_for(self, now_s: float) -> str:
        """The first thing that must happen before anything else can; it has been due for some time."""
        if self.is_over:
            return ""
        missing = [str(p) for p in range(self._places) if Place(p) not in self.members.pservers()]
        if missing:
            return f"pserver {', '.join(missing)} of {self._places} to join"
        if not self.members.trainers():
            return "a trainer to join"
        silent = [place for place, p in sorted(self.members.pservers().items()) if now_s - p.seen_s > SILENT_S]
        if silent:
            return f"pserver {silent[0]}, which is silent"
        if self._pservers is not None and (places := self._pservers.waits_for(now_s - SLOW_S)):
            return f"pserver {places[0]} to acknowledge what it was told"
        paused = [member for member, (_, _, since_s) in self._pausing.items() if now_s - since_s > SLOW_S]
        if paused and (behind := self._behind(paused[0])) is not None:
            return (
                f"{self._name(behind.member)}, {behind.batches} batches behind {self._name(paused[0])} (max_staleness)"
            )
        slow = self._script.slow_task(now_s) if self._script is not None else None
        if self._script is None or slow is None:
            return self._idle_script(now_s)
        what, member, seconds = slow
        has_begun = self._script.training.number >= 0
        return f"{what} at {self._name(member)}" + (f" for {seconds:.0f} s" if has_begun else "")

    def _idle_script(self, now_s: float) -> str:
        """The trainer that has longest been left to its script, which asks for nothing."""
        asking = self._waiting.keys() | self._pausing.keys()
        left = [t for t in self.members.trainers() if t.member not in asking and t.answered_s < now_s - SLOW_S]
        return f"{min(left, key=lambda t: t.answered_s).name} to go on in its script" if left else ""

    def _behind(self, member: Member) -> Behind | None:
        """Whom a trainer waits for under bounded staleness."""
        return self._script.behind(member) if self._script is not None and member in self._pausing else None

    def _name(self, member: Member) -> str:
        return self.members[member].name if member in self.members else "nobody"

    def _doing(self, member: Member) -> str:
        if member in self._finished:
            return "finished"
        if (behind := self._behind(member)) is not None:
            return f"waits for {self._name(behind.member)}, {behind.batches} batches behind"
        return self._script.doing.get(member, "") if self._script is not None else ""


def _request_of(answer: Message) -> Request:
    request: Request = answer.request  # type: ignore[attr-defined]  # every answer has one
    return request
