"""The master: takes messages and the time, returns what to send.

It holds no parameter and no sample. What it decides is in the parts: `members` who is there, `script` what a trainer
does next and when a step is complete, `recovery` how the job goes on through failures, `overview` what is shown. Here
is who may say what.
"""

from collections import Counter
from math import inf
from typing import NamedTuple

from evergrad.master.errands import Errand, Result
from evergrad.master.failures import Failures
from evergrad.master.members import Members, MemberState
from evergrad.master.overview import Overview
from evergrad.master.progress import Event, Progress
from evergrad.master.record import Record
from evergrad.master.recovery import Recovery
from evergrad.master.schema import difference
from evergrad.master.script import Script
from evergrad.master.settings import Settings
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
    Committed,
    Deposed,
    Done,
    Ended,
    EpochClosed,
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
    MayBegin,
    Member,
    Message,
    Missing,
    Noted,
    Over,
    Raised,
    Refused,
    ReportMetrics,
    Request,
    Restored,
    Role,
    Send,
    Shutdown,
    StartAgain,
    Status,
    StopJob,
    Term,
    TrainDone,
    Unknown,
    WantBatch,
    WantEnd,
    Written,
)

FIRST_TERM = Term(1)
PAUSE_S = 1.0
"""Ticks further apart than this are a pause of the master."""
REPLACE_S = 2.0
"""A process at a place already taken gets it when the one there is silent for so long, and is refused otherwise."""

FromMember = Heartbeat | Leave | Agree | Ask | MayBegin | AskLeader | AskCheckpoint | ReportMetrics


class _Stopping(NamedTuple):
    """The job is to end with this failure, at the latest by then; once there is a checkpoint begun after this one."""

    failure: str | None
    until_s: float
    begun: int


class Master:
    """One master's state.

    Args:
        settings: how it was started.
        term: this master's term.
        record: what the master before it has decided.

    Invariants:
    1. A member has one open request; asked again under the same id, it gets the same answer. Whether it may begin
       another batch it asks besides, and is answered by what holds then.
    2. `failure` is set once, with `is_over`; from then on every request is answered with it.
    3. An answer that follows from a change of the record goes out when the record is written, and no other ask is
       answered before. So does the answer to a report of metrics.
    """

    def __init__(self, settings: Settings, term: Term = FIRST_TERM, record: Record | None = None) -> None:
        self.is_over = False
        self.failure: str | None = None
        self.members = Members(settings.lease_s)
        self.counters: Counter[str] = Counter()
        self._settings, self._term = settings, term
        self._progress = Progress()
        self._failures = Failures(settings.max_failures)
        self._recovery = Recovery(settings, term, self.members, self._failures, self._progress, self.end)
        self._leader: Member | None = None
        self._finished: set[Member] = set()
        self._waiting: dict[Member, tuple[str, Ask | Agree]] = {}
        self._answered: dict[Member, Message] = {}
        self._held: tuple[Member, Message] | None = None
        self._pausing: dict[Member, tuple[str, MayBegin, float]] = {}
        self._knocking: dict[Member, float] = {}
        self._reported: dict[Member, tuple[str, Noted]] = {}
        self._stopping: _Stopping | None = None
        self._ticked_s: float | None = None
        if record is not None:
            self._recovery.adopt(record)
            if record.ended:
                self.end(record.failure)

    @property
    def _script(self) -> Script | None:
        return self._recovery.script

    # -- messages ------------------------------------------------------------------------------------------------------

    def handle(self, src: str, message: AnyMessage, now_s: float) -> list[Send]:
        """Deal with one message; returns what to send."""
        answer: Message | None = None
        match message:
            case Join():
                answer = self._join(message, now_s)
            case Heartbeat() | Leave() | Agree() | Ask() | MayBegin() | AskLeader() | AskCheckpoint() | ReportMetrics():
                answer = self._from_member(src, message, now_s)
            case Restored() | Committed() | EpochClosed() | Missing():
                self._recovery.from_pserver(message, now_s)
            case Frozen() | Marked() | Written() | Abandoned():
                answer = self._recovery.heard_of_cut(message, now_s)
            case HelloReply():
                self._recovery.generations.heard(message)
            case Deposed() if message.term > self._term:
                self.end(f"a newer master leads this job (term {message.term})")
            case Exited():
                answer = self._exited(message, now_s)
            case AskStatus():
                answer = self.status(message.request, now_s)
            case StopJob():
                self.stop(message, now_s)
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
                self._script.training.excuse(now_s - self._ticked_s, now_s)
        self._ticked_s = now_s
        self.members.begin_leases(now_s)
        for dead in self.members.silent(now_s):
            self._drop(dead, f"was silent for {now_s - dead.seen_s:.1f} s", now_s)
        sends = self._due(now_s)
        if self._script is not None and self._are_finished and self._stopping is None:
            self._end_alone(self._script)
        if self.has_ended:
            sends += [Send(p.address, Shutdown(self._term)) for p in self.members.present()]
        return sends

    def take_errands(self) -> list[Errand]:
        """What the process is to do now; each is answered by `done`, in whatever order."""
        return self._recovery.take_errands()

    def done(self, result: Result, now_s: float) -> list[Send]:
        """An errand is done; returns what to send."""
        self._recovery.done(result, now_s)
        return self._due(now_s)

    def _due(self, now_s: float) -> list[Send]:
        """Everything that can now be decided and answered, and what the pservers have not acknowledged."""
        sends = []
        if not self.is_over:
            self._recovery.form(self.members.present(), now_s)
            self._decide(now_s)
            is_stopping = self._stopping is not None
            self._recovery.cut(is_stopping, is_stopping or self._are_finished, now_s)
            self._end_if_due(now_s)
        self._recovery.record()
        if self._recovery.is_all_recorded:
            sends += [Send(src, noted) for src, noted in self._reported.values()]
            self._reported.clear()
        sends += self._answers(now_s)
        if self._script is not None:
            sends += self._let_begin(self._script)
        return sends if self.is_over else sends + self._recovery.due(now_s)

    def _answers(self, now_s: float) -> list[Send]:
        """Invariant 3."""
        sends = self._release_held(now_s)
        for member, (_, message) in list(self._waiting.items()):
            if self._held is not None or not self._recovery.is_recorded:
                break
            answered = self._agree(message, now_s) if isinstance(message, Agree) else self._choose(message, now_s)
            if answered is None:
                continue
            self._recovery.record()
            self._held = member, answered
            sends += self._release_held(now_s)
        return sends

    def _release_held(self, now_s: float) -> list[Send]:
        """Hand the answer held back out, if what it follows from is written."""
        if self._held is None or not self._recovery.is_recorded:
            return []
        (member, answer), self._held = self._held, None
        waiting = self._waiting.get(member)
        if waiting is None or waiting[1].request != _request_of(answer):
            return []
        del self._waiting[member]
        self._answered[member] = answer
        self.members[member].answered_s = now_s
        return [Send(waiting[0], answer)]

    def _decide(self, now_s: float) -> None:
        """The commit of the present step, and the end of an epoch, once they wait for nothing more."""
        script = self._script
        if script is None or not self._recovery.are_restored or not self._recovery.is_whole:
            return
        if (decided := script.decide(now_s)) is not None:
            self._progress.drop(decided.dropped)
            self._recovery.commit(decided.step, decided.chosen, now_s)
        if (epoch := script.training.over()) is not None:
            self._recovery.close_epoch(epoch)

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
            state = MemberState(join.member, join.role, join.name, join.pid, now_s, answered_s=now_s)
            state.numerics, state.place, state.address = join.numerics, join.place, join.address
            number = self._recovery.generations.number
            state.began = number if join.began is None else min(join.began, number)
            self._progress.note_numerics(state)
            self._progress.log_event(f"{state.name} has joined with pid {state.pid}")
            self.members.add(state)
        self.members.heard(join.member, now_s)
        return Joined(join.request, self._term, self._recovery.generations.number, self.members.lease_s)

    def _refuse_join(self, join: Join) -> str | None:
        if join.role is not Role.PSERVER:
            return None
        places = self._settings.places
        if join.place is None or join.address is None or not 0 <= join.place < places:
            return f"this job has pservers 0 to {places - 1}, not {join.place}; start it with another --place"
        there = self.members.pservers().get(join.place)
        came_s = self._knocking.get(join.member)
        if there is not None and came_s is not None and came_s + REPLACE_S < there.seen_s < inf:
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
            known, number = state is not None, self._recovery.generations.number
            is_whole = self._recovery.is_whole
            return HeartbeatReply(message.request, self._term, number, known, self.has_ended, self.failure, is_whole)
        if isinstance(message, Leave):
            if message.failure is not None and (state is not None or self.members.is_gone(message.member)):
                self._failed(state.name if state is not None else message.member, message.failure, message.raised)
            if state is not None:
                self._drop(state, "said goodbye", now_s)
            return Left(message.request)
        if state is None:
            return Ended(message.request, self.failure) if self.has_ended else Unknown(message.request)
        match message:
            case AskLeader():
                counts = message.saving is None or (self._script is not None and self._script.is_at(message.saving))
                return LeaderIs(message.request, counts and self._leads(message.member))
            case AskCheckpoint():
                self._recovery.checkpoints.is_asked = True
                return Noted(message.request)
            case ReportMetrics():
                self._progress.report(message.epoch, message.metrics)
                self._recovery.rate(message.epoch, message.best)
                self._reported[message.member] = src, Noted(message.request)
                return None
            case MayBegin():
                return self._ask_to_begin(src, message, now_s)
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
        self._pausing.pop(message.member, None)
        if isinstance(message, Ask):
            if message.done is not None and not self._is_ahead(message):
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
        if script is None or raised.generation != self._recovery.generations.number:
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
        self._progress.log_event(f"in {name} the script {failure}")
        if reason is not None:
            self.end(f"{reason}; the last time, in {name}, it {failure}")

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
        self._pausing.pop(state.member, None)
        self._finished.discard(state.member)
        if self.is_over:
            return
        self._progress.note_event(f"{state.name} {reason}")
        if state.role is Role.PSERVER:
            self._recovery.lost(state.name, reason, now_s)

    def _release(self, member: Member) -> None:
        if self._script is not None:
            self._script.release(member)

    # -- the model and the script --------------------------------------------------------------------------------------

    def _agree(self, message: Agree, now_s: float) -> Message | None:
        """The first trainer's model is the job's; the others must have the same."""
        recovery = self._recovery
        if self.is_over:
            return Ended(message.request, self.failure)
        if recovery.schema is None:
            recovery.settle(message)
            if message.schema.update.keep_inner_state:
                self._progress.note_event(
                    "trainers keep their inner optimizers' state (keep_inner_state), so what is trained depends on who"
                    " computes what: the same bits cannot be promised"
                )
            recovery.form(self.members.present(), now_s)
        elif reason := difference(recovery.schema, message.schema):
            self.counters["refused models"] += 1
            return Refused(message.request, reason)
        self._progress.note_initial(self.members[message.member].name, message.initial)
        if reason := recovery.refuse_found():
            return Refused(message.request, reason)
        if not recovery.are_restored:
            return None
        return Agreed(message.request, self._term, recovery.generations.number, recovery.generations.at)

    def _done(self, done: Done, now_s: float) -> None:
        """Take a report; one of an older generation is void."""
        script, recovery = self._script, self._recovery
        is_current = recovery.are_restored and done.generation == recovery.generations.number
        if script is None or not (is_current or isinstance(done, BreakDone)):
            return
        if isinstance(done, TrainDone):
            if (decided := script.initial(done)) is not None:
                recovery.commit(decided.step, decided.chosen, now_s)
            elif samples := script.trained(done, now_s):
                self._progress.trained(script.training.number, samples, done.metrics, now_s)
                if not recovery.checkpoints.is_sync:
                    recovery.note_work(now_s)
                self._failures.done()
                self._decide(now_s)
            return
        if isinstance(done, BreakDone):
            script.leave(done)
            if done.last is not None:
                self._done(done.last, now_s)
        script.take(done)
        recovery.note_work(now_s)

    def _choose(self, ask: Ask, now_s: float) -> Message | None:
        """The answer to an ask, or None while there is none: it waits."""
        recovery = self._recovery
        if self.is_over:
            return Ended(ask.request, self.failure)
        if self._is_ahead(ask):
            return StartAgain(ask.request)
        if isinstance(ask.want, WantEnd):
            return self._finish(ask, now_s)
        if recovery.script is None:
            return Unknown(ask.request)
        if not recovery.are_restored or not recovery.is_whole or self._stopping is not None:
            return None
        if isinstance(ask.want, WantBatch) and recovery.are_behind:
            return None
        if not isinstance(ask.want, WantBatch) and not recovery.is_applied:
            return None  # it may have left an epoch, and says so no more when this is answered
        now = Now(now_s, ask.request, self._term, recovery.generations.number)
        answer = recovery.script.next(ask, ask.want, now, self._leads)
        if isinstance(answer, Over) and not recovery.is_applied:
            return None  # or the last step may be lost with this master, and nobody be there to do it again
        return answer

    def _is_ahead(self, ask: Ask) -> bool:
        """Whether the asker's script is where the job is no more, so that it has to start again.

        It began before the job fell back behind it, or has left an epoch at a batch that is not in the model, and will
        not be: it was undone, or its push was for an older master or for an attempt that counts no more.
        """
        script, number, done = self._script, self._recovery.generations.number, ask.done
        if self.members[ask.member].began < self._recovery.fell_behind:
            return True
        if script is None or not isinstance(done, BreakDone) or done.generation is None or script.is_past(done.epoch):
            return False
        if done.generation < number:
            return True
        is_coming = done.last is not None and done.last.attempt.term == self._term
        return done.version is not None and done.version > script.training.version and not is_coming

    def _leads(self, member: Member) -> bool:
        """Whether this trainer is the leader; where there is none it becomes it."""
        if self._leader is None or self._leader not in self.members:
            self._leader = member
        return self._leader == member

    # -- the end -------------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether the job is over and the record says so."""
        return self.is_over and self._recovery.is_recorded

    def _finish(self, ask: Ask, now_s: float) -> Message | None:
        self._finished.add(ask.member)
        self._end_if_due(now_s)
        return Ended(ask.request, self.failure) if self.is_over else None

    @property
    def _are_finished(self) -> bool:
        """Whether every trainer's script is at its end, and none has to start again."""
        behind, finished = self._recovery.fell_behind, self._finished
        trainers = self.members.trainers()
        return bool(finished) and all(t.member in finished and t.began >= behind for t in trainers)

    def _end_if_due(self, now_s: float) -> None:
        """Every trainer's script is at its end, or the job is to stop; and what was trained is in a checkpoint.

        That is success unless tasks were set aside.
        """
        recovery = self._recovery
        if (stopping := self._stopping) is not None:
            checkpoints = recovery.checkpoints
            is_saved = recovery.is_now(checkpoints.is_saved) or checkpoints.has_newer(stopping.begun)
            if is_saved or now_s > stopping.until_s:
                self.end(stopping.failure)
        pservers = recovery.generations.pservers
        if not self._are_finished:
            return
        if pservers is not None and not (pservers.are_restored and pservers.have_acknowledged):
            return
        if recovery.is_now(recovery.checkpoints.may_end):
            self.end(self._failures.summary())

    def _end_alone(self, script: Script) -> None:
        """Every trainer's script is at its end: what is left of an epoch nobody will do."""
        if (reason := script.left_alone()) is not None:
            self.end(reason)

    def stop(self, message: StopJob, now_s: float) -> None:
        """Somebody has the job end: at once, or after one more checkpoint."""
        spec = self._recovery.checkpoints.spec
        is_worth_it = spec is not None and spec.url != self._settings.scratch and self._recovery.are_restored
        if message.grace_s is None or not is_worth_it:
            self.end(message.failure)
        elif self._stopping is None:
            begun = self._recovery.checkpoints.begun
            self._stopping = _Stopping(message.failure, now_s + message.grace_s, begun)

    def end(self, failure: str | None) -> None:
        """The job is over, with success if `failure` is None."""
        if not self.is_over:
            self.is_over, self.failure = True, failure
            self._recovery.ended(failure)
            self._progress.log_event("the job is over" if failure is None else f"the job has failed: {failure}")

    # -- for people ----------------------------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """What has happened since the last call, for the log."""
        return self._progress.take_events()

    def status(self, request: Request, now_s: float) -> Status:
        """How the job goes."""
        paused = {member: since_s for member, (_, _, since_s) in self._pausing.items()}
        overview = Overview(
            self._settings, self._term, self._recovery, self.members, self._failures, self._progress, self._finished,
            paused, set(self._waiting), self.is_over, self.has_ended, self.failure,
        )  # fmt: skip
        return overview.status(request, dict(self.counters + self.members.counters()), now_s)


def _request_of(answer: Message) -> Request:
    request: Request = answer.request  # type: ignore[attr-defined]  # every answer has one
    return request
