"""Where the trainers' common script is: what each may do next, and what of it is done.

Every trainer runs the same script and says where it is in it; here is decided what it does there. The script's epochs,
evaluations and savings come in one order for all, whoever joins or leaves.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

import msgspec

from evergrad.master.calls import Call, Evaluation, Saving
from evergrad.master.dispatch import AttemptNumbers, TaskPool
from evergrad.master.pace import Behind
from evergrad.master.record import Record
from evergrad.master.training import AsyncEpoch, Failed, Now, Training
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Ask,
    Attempt,
    Begin,
    BreakDone,
    DataSpec,
    EpochIs,
    EvalDone,
    EvalTask,
    EvaluationDone,
    GiveUp,
    InitTask,
    MayBegin,
    Member,
    Message,
    Over,
    Progress,
    Raised,
    Refused,
    Request,
    SaveDone,
    SaveTask,
    SavingDone,
    Standing,
    StartAgain,
    TotalsAre,
    TrainDone,
    UpdateSpec,
    WantBatch,
    WantEpoch,
    WantSaved,
    WantTotals,
)

SLOW_S = 1.0
"""A task pending for longer is shown as waited for."""
REMEMBERED_EPOCHS = 100
"""Evaluations and savings of so many past epochs are remembered, and those outside of the loops over epochs."""


class Decided(NamedTuple):
    """A commit that was decided: the step, the pushes it is made of as (task, attempt), and samples it does without."""

    step: int
    chosen: tuple[tuple[int, Attempt], ...]
    dropped: int = 0


class Script:
    """The script, through all generations.

    Args:
        update: the job's update rule.
        numbers: numbers attempts.
        may_pass: whether scripts may pass this place, since no fall-back will go behind it.

    Invariants:
    1. The initial values are committed before anything else is handed out.
    2. A task of a step is handed out only when the commit of the step before is decided.
    3. No step is handed out while an evaluation or a saving is open, and none of these opens inside an epoch.
    """

    def __init__(
        self, update: UpdateSpec, numbers: AttemptNumbers, may_pass: Callable[[Progress], bool] = lambda _: True
    ) -> None:
        self.training = Training(update, numbers)
        self.epochs = 0
        self.doing: dict[Member, str] = {}
        self._is_sync = update.is_sync
        self._numbers = numbers
        self._may_pass_at = may_pass
        self._initial = TaskPool([0], numbers, None)
        self._is_initialized = False
        self._adopted: Progress | None = None
        self.passed = -1
        """The last epoch whose batches scripts are past."""
        self._left_until = 0
        self._outside = {-1}
        """The places before, between and after the loops over epochs, by which every script comes."""
        self._evaluations: dict[Call, Evaluation] = {}
        self._savings: dict[Call, Saving] = {}
        self._to_look_at: list[Evaluation | Saving] = []
        """Calls among which are all that are open: those not done when last looked at, and newer ones."""

    # -- other generations and masters ---------------------------------------------------------------------------------

    def progress(self) -> Progress | None:
        """How far it is, None before the initial values; in `async` without the standing of tasks."""
        if not self._is_initialized:
            return None
        return msgspec.structs.replace(self.training.progress(), left_until=self._left_until)

    def restore(self, progress: Progress | None, are_told: bool = True) -> None:
        """A generation begins there, or with nothing: what anybody held is void.

        Where another master's goes on, pservers may not have been told of the end of the epoch (not `are_told`).
        """
        self.doing.clear()
        self._adopted = None
        self._initial = TaskPool([0], self._numbers, None)
        self._is_initialized = progress is not None
        self.training.restore(progress or Progress(), are_told)
        if progress is not None:
            self._left_until = max(self._left_until, progress.left_until)
        # those that are not done begin anew when scripts are there again, which may be some epochs behind
        self._evaluations = {call: e for call, e in self._evaluations.items() if e.is_done}
        self._savings = {call: s for call, s in self._savings.items() if s.is_done}
        self._to_look_at = []

    def go_back(self, progress: Progress | None) -> None:
        """Scripts start again, to go on there: nothing beyond was done."""
        at = progress or Progress()
        self.passed = at.epoch if at.is_closed else max(at.epoch - 1, -1)
        self._left_until = at.left_until
        stays = {epoch for epoch, _ in (*self._evaluations, *self._savings) if epoch <= self.passed}
        stays |= {at.epoch} & self._outside  # such a call may have come before the epoch
        self._evaluations = {call: e for call, e in self._evaluations.items() if call[0] in stays}
        self._savings = {call: s for call, s in self._savings.items() if call[0] in stays}

    def is_past(self, epoch: int) -> bool:
        """Whether training is past this epoch."""
        open_epoch = self.training.epoch
        return self.training.number > epoch or (
            open_epoch is not None and open_epoch.number == epoch and open_epoch.is_closed
        )

    def calls_done(self) -> tuple[tuple[EvaluationDone, ...], tuple[SavingDone, ...]]:
        """The evaluations and savings that are done."""
        evaluations = (
            EvaluationDone(*call, e.data, e.totals, e.failure) for call, e in self._evaluations.items() if e.is_done
        )
        savings = (SavingDone(*call, s.path, s.failure) for call, s in self._savings.items() if s.is_done)
        return tuple(evaluations), tuple(savings)

    def adopt(self, record: Record) -> None:
        """Take over what another master has seen."""
        self.epochs, self._left_until, self.passed = record.epochs, record.progress.left_until, record.passed
        self._adopted, self._outside = record.progress, {-1, *record.outside}
        self.take_calls(record.evaluations, record.savings)

    def take_calls(self, evaluations: Iterable[EvaluationDone], savings: Iterable[SavingDone]) -> None:
        """These were done before."""
        self._evaluations = {(e.epoch, e.ordinal): Evaluation.again(e, self._numbers) for e in evaluations}
        self._savings = {(s.epoch, s.ordinal): Saving.again(s, self._numbers) for s in savings}
        self._to_look_at = []

    @property
    def begun(self) -> Progress:
        """The epoch begun last, and at which version it was left; of one not left the pservers know how far it is."""
        if self._adopted is not None:
            return self._adopted
        progress, epoch = self.training.progress(), self.training.epoch
        is_left = epoch is not None and epoch.is_left
        version = progress.version if is_left else 0
        return msgspec.structs.replace(progress, version=version, is_closed=is_left, left_until=self._left_until)

    def facts(self) -> Hashable:
        """What of it the next master must know, in short."""
        done = len(self._evaluations) + len(self._savings) - len(self._open_calls())
        return self.begun, self.epochs, self.passed, done, len(self._outside)

    def outside(self) -> tuple[int, ...]:
        """The places before, between and after the loops over epochs."""
        return tuple(sorted(self._outside))

    def resume(self, version: int, standing: Standing, is_over: bool) -> None:
        """Another master's epoch is where the pservers say, of whom some may not know yet that it is over.

        It is not left if the last commit before that was lost with the master.
        """
        begun = self.begun
        is_closed = (begun.is_closed and version >= begun.version) or is_over
        if begun.is_closed and not is_closed:
            self._left_until = min(self._left_until, begun.epoch)  # nor is the loop that it is in
        at = msgspec.structs.replace(
            begun, version=version, standing=standing, is_closed=is_closed, left_until=self._left_until
        )
        self.restore(at, are_told=False)

    @property
    def steps(self) -> int:
        """Steps so far, or in `async` batches."""
        return self.training.steps

    @property
    def is_idle(self) -> bool:
        """Whether nothing is trained: the model does not change."""
        return self._is_initialized and self.training.is_idle

    @property
    def is_settling(self) -> bool:
        """Whether an epoch is over of which batches may still be on their way: there is no moment to show."""
        epoch = self.training.epoch
        return epoch is not None and epoch.is_closed and not self.training.is_idle

    def _may_pass(self) -> bool:
        progress = self.progress()
        return progress is not None and self._may_pass_at(progress)

    # -- what is done --------------------------------------------------------------------------------------------------

    def initial(self, done: TrainDone) -> Decided | None:
        """The commit of the initial values, if it is these that are reported handed in."""
        if not self._initial.finish(done.attempt):
            return None
        if done.contributed:
            self._is_initialized = True
            return Decided(INIT_STEP, ((0, done.attempt),))
        self._initial = TaskPool([0], self._numbers, None)
        return None

    def trained(self, done: TrainDone, now_s: float) -> int:
        """A task is reported done; returns the samples that count by it: 0 if it counts no more."""
        epoch = self.training.epoch
        return epoch.finish(done, now_s) if epoch is not None else 0

    def decide(self, now_s: float) -> Decided | None:
        """The commit of the present step, once it waits for nothing more."""
        training = self.training
        if training.epoch is None:
            return None
        dropped = training.epoch.drop_late(now_s)
        chosen = training.epoch.commit()
        if chosen is None:
            return None
        training.version += 1
        return Decided(training.version - 1, tuple(chosen), dropped)

    def settle(self) -> None:
        """Whoever waits for a task has got one if there is any."""
        if isinstance(self.training.epoch, AsyncEpoch):
            self.training.epoch.settle()

    def may_begin(self, ask: MayBegin) -> Begin | GiveUp | None:
        """Whether a trainer may begin another batch of its task; None: it waits."""
        epoch = self.training.epoch
        may = epoch.may_begin(ask.member, ask.attempt, ask.done) if isinstance(epoch, AsyncEpoch) else None
        if may is None:
            return GiveUp(ask.request)
        return Begin(ask.request) if may else None

    def behind(self, member: Member) -> Behind | None:
        """Whom a trainer that may not begin another batch waits for."""
        epoch = self.training.epoch
        return epoch.pace.behind(member) if isinstance(epoch, AsyncEpoch) and epoch.pace is not None else None

    def failed(self, raised: Raised) -> Failed | None:
        """The script has raised in a task; None if that attempt counts no more."""
        epoch = self.training.epoch
        return epoch.failed(raised.attempt, raised.batches) if epoch is not None else None

    def set_aside(self, failed: Failed) -> None:
        """The present epoch does without a task."""
        assert self.training.epoch is not None
        self.training.epoch.set_aside(failed.task)

    def leave(self, done: BreakDone) -> None:
        """A loop is about to be left: a commit that follows from what was done last is the epoch's end."""
        epoch = self.training.epoch
        if epoch is not None and epoch.number == done.epoch:
            epoch.is_leaving = True
        self._left_until = max(self._left_until, done.left_until)

    def take(self, done: EvalDone | SaveDone | BreakDone) -> None:
        """An evaluation, a saving or the leaving of a loop is reported."""
        match done:
            case EvalDone():
                for call in self._to_look_at:
                    if isinstance(call, Evaluation):
                        call.finish(done)
                self._to_look_at = self._open_calls()
            case SaveDone():
                for call in self._to_look_at:
                    if isinstance(call, Saving):
                        call.finish(done.attempt, done.failure)
                self._to_look_at = self._open_calls()
            case BreakDone():
                epoch = self.training.epoch
                if epoch is not None and epoch.number == done.epoch:
                    epoch.close()
                    self.passed = max(self.passed, epoch.number)

    def is_at(self, saving: Attempt) -> bool:
        """Whether this attempt at a saving counts, if it is reported done."""
        return any(isinstance(call, Saving) and call.is_at(saving) for call in self._open_calls())

    def release(self, member: Member) -> None:
        """A member holds nothing any more."""
        self.doing.pop(member, None)
        self._initial.release(member)
        if self.training.epoch is not None:
            self.training.epoch.release(member)
        for call in self._open_calls():
            call.release(member)

    # -- what is next --------------------------------------------------------------------------------------------------

    def next(
        self,
        ask: Ask,
        want: WantEpoch | WantBatch | WantTotals | WantSaved,
        now: Now,
        leads: Callable[[Member], bool],
    ) -> Message | None:
        """What a trainer at this place of the script does; None while there is nothing for it: it waits.

        Args:
            leads: whether a member is the leader, or becomes it.
        """
        if isinstance(want, WantEpoch):
            return self._epoch(ask.request, want)
        if not self._is_initialized:
            return self._initial_task(ask, now)
        match want:
            case WantBatch():
                return self._batch(ask, want, now)
            case WantTotals():
                return self._totals(ask, want, now)
            case WantSaved():
                return self._saved(ask, want, now, leads)

    def _epoch(self, request: Request, want: WantEpoch) -> Message:
        self.epochs = max(self.epochs, want.until)
        self._outside.add(want.until)
        epoch = max(want.after + 1, self.training.number)
        is_left = want.until <= self._left_until
        return EpochIs(request, epoch if epoch < want.until and not is_left else None)

    def _initial_task(self, ask: Ask, now: Now) -> Message | None:
        handed = self._initial.hand_out(ask.member, now.time_s, None)
        if handed is None:
            return None
        self.doing[ask.member] = "initial values"
        return InitTask(ask.request, now.term, now.generation, handed[1])

    def _batch(self, ask: Ask, want: WantBatch, now: Now) -> Message | None:
        epoch = self.training.epoch
        if epoch is None or want.epoch > epoch.number:
            if not self.training.is_idle or self._open_calls() or not self._may_pass():
                return None
            epoch = self.training.open(want.epoch, want.data)
            self._forget_calls()
        if want.epoch < epoch.number:
            return Over(ask.request)
        if want.data != epoch.data and not epoch.is_closed:
            return Refused(ask.request, _other_data("batches", epoch.data, want.data))
        task = epoch.hand_out(ask.member, now)
        if task is not None:
            self.doing[ask.member] = f"epoch {epoch.number} step {epoch.step}"
            return task
        if not (epoch.is_closed and self._may_pass()):
            return None
        self.passed = max(self.passed, epoch.number)
        return Over(ask.request)

    def _totals(self, ask: Ask, want: WantTotals, now: Now) -> Message | None:
        call = (want.epoch, want.ordinal)
        if call not in self._evaluations:
            if not self._may_open(want):
                return self._wait_or_refuse(ask.request, "evaluate", want)
            self._evaluations[call] = Evaluation(want.data, self._numbers)
            self._to_look_at.append(self._evaluations[call])
        evaluation = self._evaluations[call]
        if want.data != evaluation.data and not evaluation.is_past:
            return Refused(ask.request, _other_data("evaluate", evaluation.data, want.data))
        if evaluation.failure is not None:
            return Refused(ask.request, evaluation.failure)
        if evaluation.is_done:
            return TotalsAre(ask.request, evaluation.totals)
        handed = evaluation.hand_out(ask.member, now.time_s)
        if handed is None:
            return None
        self.doing[ask.member] = f"evaluates after epoch {self.training.number}"
        return EvalTask(ask.request, now.term, now.generation, handed[0], self._version(), *handed[1:])

    def _saved(self, ask: Ask, want: WantSaved, now: Now, leads: Callable[[Member], bool]) -> Message | None:
        call = (want.epoch, want.ordinal)
        if call not in self._savings:
            if not self._may_open(want):
                return self._wait_or_refuse(ask.request, "save_model", want)
            self._savings[call] = Saving(want.path, self._numbers)
            self._to_look_at.append(self._savings[call])
        saving = self._savings[call]
        if want.path != saving.path and not saving.is_past:
            reason = f"save_model: this trainer saves to {want.path!r}, the others to {saving.path!r}"
            return Refused(ask.request, f"{reason}; give all the same path")
        if saving.is_done:
            return Over(ask.request) if saving.failure is None else Refused(ask.request, saving.failure)
        if not leads(ask.member) or (attempt := saving.hand_out(ask.member, now.time_s)) is None:
            return None
        self.doing[ask.member] = f"saves {saving.path}"
        return SaveTask(ask.request, now.term, now.generation, attempt, self._version())

    def _may_open(self, want: WantTotals | WantSaved) -> bool:
        """Whether a call at this place of the script can begin: nothing is trained, nothing else is open."""
        is_free = self.training.is_idle and not self._open_calls() and self._may_pass()
        return is_free and not self._has_passed(want)

    def _has_passed(self, want: WantTotals | WantSaved) -> bool:
        """Whether the job is behind this place of the script; that before the first loop has the number -1."""
        return want.epoch < self.training.number + (want.is_outside and want.epoch >= 0)

    def _wait_or_refuse(self, request: Request, what: str, want: WantTotals | WantSaved) -> Message | None:
        number = self.training.number
        if not self._has_passed(want):
            return None
        if want.epoch < number - REMEMBERED_EPOCHS:
            return StartAgain(request)
        if want.is_outside and want.epoch >= 0:
            return Refused(request, f"{what}: {_too_short(number)}")
        reason = f"{what}: this trainer calls it in epoch {want.epoch} where the others did not"
        return Refused(request, f"{reason}; run the same script everywhere")

    def left_alone(self) -> str | None:
        """Why nobody will do what is left of the present epoch, when all scripts are at their ends."""
        epoch = self.training.epoch
        return None if epoch is None or epoch.is_closed else _too_short(epoch.number)

    def _open_calls(self) -> list[Evaluation | Saving]:
        return [call for call in self._to_look_at if not call.is_done]

    def _forget_calls(self) -> None:
        """Drop those that no script asks for any more, but one so far behind that it may as well start again."""
        oldest = self.training.number - REMEMBERED_EPOCHS
        old = {epoch for epoch, _ in (*self._evaluations, *self._savings) if epoch < oldest} - self._outside
        if old:
            self._evaluations = {call: e for call, e in self._evaluations.items() if call[0] not in old}
            self._savings = {call: s for call, s in self._savings.items() if call[0] not in old}

    def _version(self) -> int:
        return self.training.version if self._is_sync else NEWEST

    # -- status --------------------------------------------------------------------------------------------------------

    def phase(self) -> str:
        """What is under way, in a word or two."""
        if not self._is_initialized:
            return "starting"
        if calls := self._open_calls():
            return "saving" if isinstance(calls[0], Saving) else "evaluating"
        return "between epochs" if self.training.is_idle else "training"

    def slow_task(self, now_s: float) -> tuple[str, Member, float] | None:
        """What has been pending longest, who holds it and for how long, if that is long."""
        pending = [("the initial values", *held) for held in self._initial.pending().values()]
        if self.training.epoch is not None:
            pending += [(f"task {index}", *held) for index, held in self.training.epoch.waits_for().items()]
        for call in self._open_calls():
            pending += [(call.title, *held) for held in call.waits_for().values()]
        if not pending:
            return None
        what, member, since_s = min(pending, key=lambda held: held[2])
        return (what, member, now_s - since_s) if now_s - since_s > SLOW_S else None


def _too_short(number: int) -> str:
    """A script that has fewer epochs than the job."""
    return (
        f"the job is in epoch {number} already, where a longer run has left it or others have brought it, and"
        f" this script ends before; let job.epochs count to {number + 1} or more, or begin anew in another place"
    )


_SAME_DATA = "give all trainers the same, and a job that goes on in mid-epoch what that epoch began with"


def _other_data(what: str, first: DataSpec, other: DataSpec) -> str:
    fields: list[tuple[str, Callable[[DataSpec], object]]] = [
        ("samples", lambda d: d.samples),
        ("batch size", lambda d: d.batch_size),
        ("content", lambda d: d.fingerprint),
    ]
    differ = [f"{name} {of(first)} and {of(other)}" for name, of in fields if of(first) != of(other)]
    return f"{what}: this trainer's data is not the job's ({'; '.join(differ)}); {_SAME_DATA}"
