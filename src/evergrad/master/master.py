"""The master: takes messages and the time, returns what to send.

It holds no parameter and no sample. What it decides is in the parts: `members` who is there, `training` which task
comes next and when a step is complete, `calls` evaluations and saving, `pservers` what they still have to acknowledge.
Here is who may ask for what, and when.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from evergrad.errors import DataError
from evergrad.master.calls import Call, Evaluation, Saving
from evergrad.master.dispatch import AttemptNumbers, TaskPool
from evergrad.master.members import Members, MemberState
from evergrad.master.progress import Progress
from evergrad.master.pservers import Pservers
from evergrad.master.schema import difference
from evergrad.master.training import Now, Training
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Agree,
    Agreed,
    AnyMessage,
    Ask,
    AskLeader,
    AskStatus,
    Attempt,
    BreakDone,
    Commit,
    Committed,
    DataSpec,
    Deposed,
    Done,
    Ended,
    EpochIs,
    EvalDone,
    EvalTask,
    Exited,
    Generation,
    Heartbeat,
    HeartbeatReply,
    InitTask,
    Join,
    Joined,
    LeaderIs,
    Leave,
    Left,
    Member,
    Message,
    Missing,
    Noted,
    Over,
    Place,
    PserverAt,
    Refused,
    ReportMetrics,
    Request,
    Restored,
    Role,
    SaveDone,
    SaveTask,
    Schema,
    Send,
    Shutdown,
    Status,
    StopJob,
    Term,
    TotalsAre,
    TrainDone,
    Unknown,
    UpdateName,
    WantBatch,
    WantEnd,
    WantEpoch,
    WantSaved,
    WantTotals,
)

FIRST_TERM = Term(1)
SLOW_S = 1.0
"""What has taken longer is shown as waited for."""

FromMember = Heartbeat | Leave | Agree | Ask | AskLeader | ReportMetrics


class Master:
    """One master's state.

    Args:
        job: the job's name.
        pservers: how many places there are.
        lease_s: silence after which a member counts as dead.
        term: this master's term.

    Invariants:
    1. A task of a step is handed out only when the commit of the step before is decided.
    2. A member has one open request; asked again under the same id, it gets the same answer.
    3. No step is handed out while an evaluation or a saving is open.
    """

    def __init__(self, job: str, pservers: int, lease_s: float, term: Term = FIRST_TERM) -> None:
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
        self._training: Training | None = None
        self._initial = TaskPool([0], self._numbers, {})
        self._epochs = 0
        self._left_until = 0
        self._evaluations: dict[Call, Evaluation] = {}
        self._savings: dict[Call, Saving] = {}
        self._leader: Member | None = None
        self._finished: set[Member] = set()
        self._waiting: dict[Member, tuple[str, Ask | Agree]] = {}
        self._answered: dict[Member, Message] = {}
        self._progress = Progress()

    # -- messages ------------------------------------------------------------------------------------------------------

    def handle(self, src: str, message: AnyMessage, now_s: float) -> list[Send]:
        """Deal with one message; returns what to send."""
        answer: Message | None = None
        match message:
            case Join():
                answer = self._join(message, now_s)
            case Heartbeat() | Leave() | Agree() | Ask() | AskLeader() | ReportMetrics():
                answer = self._from_member(src, message, now_s)
            case Restored():
                if self._pservers is not None and message.generation == self._generation:
                    self._pservers.restored(message)
            case Committed():
                if self._pservers is not None and message.generation == self._generation:
                    self._pservers.committed(message)
            case Missing():
                self.end(f"pserver {message.place} lacks a push that step {message.step} names; please report this bug")
            case Deposed():
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
        """Let time pass: leases run out, what was not acknowledged is sent again."""
        for dead in self.members.silent(now_s):
            self._drop(dead, f"was silent for {now_s - dead.seen_s:.1f} s")
        sends = self._due(now_s)
        if self.is_over:
            sends += [Send(p.address, Shutdown(self._term)) for p in self._present()]
        return sends

    def _due(self, now_s: float) -> list[Send]:
        """Everything that can now be answered, and what the pservers have not acknowledged."""
        sends = []
        for member, (src, message) in list(self._waiting.items()):
            answer = self._agree(message) if isinstance(message, Agree) else self._choose(message, now_s)
            if answer is not None:
                del self._waiting[member]
                self._answered[member] = answer
                sends.append(Send(src, answer))
        if self._pservers is not None and not self.is_over:
            sends += self._pservers.due(now_s)
        return sends

    # -- members -------------------------------------------------------------------------------------------------------

    def _join(self, join: Join, now_s: float) -> Message:
        if self.is_over:
            return Ended(join.request, self.failure)
        if join.member not in self.members:
            if reason := self._refuse_join(join):
                self.counters["refused joins"] += 1
                return Refused(join.request, reason)
            state = MemberState(join.member, join.role, join.name, join.pid, now_s)
            state.numerics, state.place, state.address = join.numerics, join.place, join.address
            self._progress.note_numerics(state)
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
                state.idle_s = message.idle_s
            known = state is not None
            return HeartbeatReply(message.request, self._term, self._generation, known, self.is_over, self.failure)
        if isinstance(message, Leave):
            if state is not None:
                self._leave(state, message.failure)
            return Left(message.request)
        if state is None:
            return Ended(message.request, self.failure) if self.is_over else Unknown(message.request)
        match message:
            case AskLeader():
                return LeaderIs(message.request, self._leads(message.member))
            case ReportMetrics():
                self._progress.report(message.epoch, message.metrics)
                return Noted(message.request)
            case Agree() | Ask():
                return self._open_request(src, message, now_s)

    def _open_request(self, src: str, message: Ask | Agree, now_s: float) -> Message | None:
        """Invariant 2. What is answered later waits; `_due` answers it."""
        answered = self._answered.get(message.member)
        if answered is not None and message.request <= _request_of(answered):
            self.counters["repeated requests"] += 1
            return answered if message.request == _request_of(answered) else None
        waiting = self._waiting.get(message.member)
        if waiting is not None and message.request <= waiting[1].request:
            return None
        if isinstance(message, Ask):
            if message.done is not None and (reason := self._done(message.done, now_s)):
                answer = Refused(message.request, reason)
                self._answered[message.member] = answer
                return answer
            self._release(message.member)
        self._waiting[message.member] = src, message
        return None

    def _leave(self, state: MemberState, failure: str | None) -> None:
        if failure is not None:
            self.end(f"the script raised in {state.name}:\n{failure}")
        self._drop(state, "said goodbye")

    def _exited(self, message: Exited) -> Message:
        state = self.members.named(message.name, message.pid)
        if state is not None:
            self._drop(state, "its process ended")
        return Noted(message.request)

    def _drop(self, state: MemberState, reason: str) -> None:
        """A member is gone: what it held goes to others."""
        self.members.remove(state.member)
        self._release(state.member)
        self._waiting.pop(state.member, None)
        self._answered.pop(state.member, None)
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
        self._initial.release(member)
        if self._training is not None and self._training.epoch is not None:
            self._training.epoch.release(member)
        for call in self._open_calls():
            call.release(member)
        if member in self.members:
            self.members[member].doing = ""

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
        elif reason := difference(self._schema, message.schema):
            self.counters["refused models"] += 1
            return Refused(message.request, reason)
        if self._pservers is None:
            if len(present := self._present()) < self._places:
                return None
            self._generation = Generation(self._generation + 1)
            self._pservers = Pservers(self._term, self._generation, tuple(present), self._schema)
            self._training = Training(self._schema.update, self._numbers)
        if not self._pservers.are_restored:
            return None
        return Agreed(message.request, self._term, self._generation, self._pservers.at)

    def _commit(self, step: int, chosen: Sequence[tuple[int, Attempt]]) -> None:
        assert self._pservers is not None
        self._pservers.commit(Commit(self._term, self._generation, step, tuple(chosen), None))

    # -- what a trainer has done ---------------------------------------------------------------------------------------

    def _done(self, done: Done, now_s: float) -> str | None:
        """Take a report; returns why it is refused, or None. A report of an older generation is void."""
        if isinstance(done, BreakDone):
            self._break(done)
            return None
        if done.generation != self._generation:
            return None
        match done:
            case TrainDone():
                self._train_done(done, now_s)
            case EvalDone():
                return self._eval_done(done)
            case SaveDone():
                for saving in self._savings.values():
                    saving.finish(done.attempt, done.failure)
        return None

    def _train_done(self, done: TrainDone, now_s: float) -> None:
        training = self._training
        if training is None:
            return
        if self._initial.finish(done.attempt):
            if done.contributed:
                self._commit(INIT_STEP, [(0, done.attempt)])
            else:
                self._initial = TaskPool([0], self._numbers, {})
            return
        if (epoch := training.epoch) is None:
            return
        if samples := epoch.finish(done, now_s):
            self._progress.trained(samples, done.metrics, now_s)
        if (chosen := epoch.commit()) is not None:
            self._commit(training.version, chosen)
            training.version += 1

    def _eval_done(self, done: EvalDone) -> str | None:
        try:
            for evaluation in self._evaluations.values():
                if not evaluation.is_done:
                    evaluation.finish(done.attempt, done.totals)
        except DataError as exc:
            self.end(str(exc))
            return str(exc)
        return None

    def _break(self, done: BreakDone) -> None:
        epoch = self._training.epoch if self._training is not None else None
        if epoch is not None and epoch.number == done.epoch:
            epoch.close()
        self._left_until = max(self._left_until, done.left_until)

    # -- what a trainer does next --------------------------------------------------------------------------------------

    def _choose(self, ask: Ask, now_s: float) -> Message | None:
        """The answer to an ask, or None while there is none: it waits."""
        if self.is_over:
            return Ended(ask.request, self.failure)
        training = self._training
        if training is None:
            return Unknown(ask.request)
        now = Now(now_s, ask.request, self._term, self._generation)
        match ask.want:
            case WantEnd():
                return self._finish(ask)
            case WantEpoch():
                return self._epoch(ask.request, ask.want, training)
            case WantBatch() | WantTotals() | WantSaved():
                if self._initial.done == 0:
                    return self._initial_task(ask, now_s)
                return self._work(ask, ask.want, training, now)

    def _work(self, ask: Ask, want: WantBatch | WantTotals | WantSaved, training: Training, now: Now) -> Message | None:
        match want:
            case WantBatch():
                return self._batch(ask, want, training, now)
            case WantTotals():
                return self._totals(ask, want, training, now)
            case WantSaved():
                return self._saved(ask, want, training, now)

    def _epoch(self, request: Request, want: WantEpoch, training: Training) -> Message:
        self._epochs = max(self._epochs, want.until)
        epoch = max(want.after + 1, training.number)
        is_left = want.until <= self._left_until
        return EpochIs(request, epoch if epoch < want.until and not is_left else None)

    def _initial_task(self, ask: Ask, now_s: float) -> Message | None:
        handed = self._initial.hand_out(ask.member, now_s, None)
        if handed is None:
            return None
        self._doing(ask.member, "initial values")
        return InitTask(ask.request, self._term, self._generation, handed[1])

    def _batch(self, ask: Ask, want: WantBatch, training: Training, now: Now) -> Message | None:
        epoch = training.epoch
        if epoch is None or want.epoch > epoch.number:
            if not training.is_idle or self._open_calls():
                return None
            epoch = training.open(want.epoch, want.data)
            self._progress.open_epoch(now.time_s)
        if want.epoch < epoch.number:
            return Over(ask.request)
        if want.data != epoch.data:
            return Refused(ask.request, _other_data("batches", epoch.data, want.data))
        if epoch.is_closed:
            return Over(ask.request)
        task = epoch.hand_out(ask.member, now)
        if task is not None:
            self._doing(ask.member, f"epoch {epoch.number} step {epoch.step}")
        return task

    def _totals(self, ask: Ask, want: WantTotals, training: Training, now: Now) -> Message | None:
        call = (want.epoch, want.ordinal)
        if call not in self._evaluations:
            if not self._may_open(want.epoch, training):
                return self._wait_or_refuse(ask.request, "evaluate", want.epoch, training)
            self._evaluations[call] = Evaluation(want.data, self._numbers)
        evaluation = self._evaluations[call]
        if want.data != evaluation.data:
            return Refused(ask.request, _other_data("evaluate", evaluation.data, want.data))
        if evaluation.is_done:
            return TotalsAre(ask.request, evaluation.totals)
        handed = evaluation.hand_out(ask.member, now.time_s)
        if handed is None:
            return None
        self._doing(ask.member, f"evaluates after epoch {training.number}")
        return EvalTask(ask.request, self._term, self._generation, handed[0], self._version(training), *handed[1:])

    def _saved(self, ask: Ask, want: WantSaved, training: Training, now: Now) -> Message | None:
        call = (want.epoch, want.ordinal)
        if call not in self._savings:
            if not self._may_open(want.epoch, training):
                return self._wait_or_refuse(ask.request, "save_model", want.epoch, training)
            self._savings[call] = Saving(want.path, self._numbers)
        saving = self._savings[call]
        if saving.is_done:
            return Over(ask.request) if saving.failure is None else Refused(ask.request, saving.failure)
        if not self._leads(ask.member) or (attempt := saving.hand_out(ask.member, now.time_s)) is None:
            return None
        self._doing(ask.member, f"saves {saving.path}")
        return SaveTask(ask.request, self._term, self._generation, attempt, self._version(training))

    def _leads(self, member: Member) -> bool:
        """Whether this trainer is the leader; where there is none it becomes it."""
        if self._leader is None or self._leader not in self.members:
            self._leader = member
        return self._leader == member

    def _may_open(self, epoch: int, training: Training) -> bool:
        """Whether a call at this place in the script can begin: nothing is trained, nothing else is open."""
        return training.is_idle and epoch >= training.number and not self._open_calls()

    def _wait_or_refuse(self, request: Request, what: str, epoch: int, training: Training) -> Message | None:
        if epoch < training.number:
            reason = f"{what}: this trainer calls it in epoch {epoch} where the others did not"
            return Refused(request, f"{reason}; run the same script everywhere")
        return None

    def _open_calls(self) -> list[Evaluation | Saving]:
        calls: list[Evaluation | Saving] = [*self._evaluations.values(), *self._savings.values()]
        return [call for call in calls if not call.is_done]

    def _version(self, training: Training) -> int:
        assert self._schema is not None
        return training.version if self._schema.update.name is UpdateName.SYNC else NEWEST

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, ask: Ask) -> Message | None:
        self._finished.add(ask.member)
        self._doing(ask.member, "finished")
        self._end_if_finished()
        return Ended(ask.request, self.failure) if self.is_over else None

    def _end_if_finished(self) -> None:
        trainers = self.members.trainers()
        if self._finished and all(t.member in self._finished for t in trainers):
            self.end(None)

    def end(self, failure: str | None) -> None:
        """The job is over, with success if `failure` is None."""
        if not self.is_over:
            self.is_over, self.failure = True, failure

    # -- status --------------------------------------------------------------------------------------------------------

    def status(self, request: Request, now_s: float) -> Status:
        """How the job goes."""
        training = self._training
        epoch = training.epoch if training is not None else None
        return Status(
            request=request,
            job=self._job,
            phase=self._phase(),
            waiting_for=self._waiting_for(now_s),
            epoch=training.number if training is not None else -1,
            epochs=self._epochs,
            step=epoch.step if epoch is not None else 0,
            steps=epoch.steps if epoch is not None else 0,
            version=training.version if training is not None else 0,
            samples=self._progress.samples,
            samples_per_s=self._progress.samples_per_s(now_s),
            live=self._progress.live(),
            reported=self._progress.reported,
            members=self.members.status(now_s),
            counters=dict(self.counters),
            notes=tuple(self._progress.notes),
            ended=self.is_over,
            failure=self.failure,
        )

    def _phase(self) -> str:
        if self.is_over:
            return "ended"
        if self._schema is None:
            return "forming"
        if self._pservers is None or not self._pservers.are_restored:
            return "restoring"
        if self._training is not None and not self._training.is_idle:
            return "training"
        return "between epochs"

    def _waiting_for(self, now_s: float) -> str:
        if self.is_over:
            return ""
        missing = [str(p) for p in range(self._places) if Place(p) not in self.members.pservers()]
        if missing:
            return f"pserver {', '.join(missing)} of {self._places} to join"
        if not self.members.trainers():
            return "a trainer to join"
        if self._pservers is not None and (places := self._pservers.waits_for(now_s - SLOW_S)):
            return f"pserver {places[0]} to acknowledge what it was told"
        epoch = self._training.epoch if self._training is not None else None
        pending = epoch.waits_for() if epoch is not None and not epoch.is_closed else {}
        slow = {i: (member, since) for i, (member, since) in pending.items() if now_s - since > SLOW_S}
        if not slow:
            return ""
        index, (member, since) = min(slow.items(), key=lambda item: item[1][1])
        name = self.members[member].name if member in self.members else "nobody"
        return f"task {index} at {name} for {now_s - since:.0f} s"

    def _doing(self, member: Member, what: str) -> None:
        self.members[member].doing = what


def _request_of(answer: Message) -> Request:
    request: Request = answer.request  # type: ignore[attr-defined]  # every answer has one
    return request


def _other_data(what: str, first: DataSpec, other: DataSpec) -> str:
    fields: list[tuple[str, Callable[[DataSpec], object]]] = [
        ("samples", lambda d: d.samples),
        ("batch size", lambda d: d.batch_size),
        ("content", lambda d: d.fingerprint),
    ]
    differ = [f"{name} {of(first)} and {of(other)}" for name, of in fields if of(first) != of(other)]
    return f"{what}: this trainer's data is not the other trainers' ({'; '.join(differ)}); give all the same"
