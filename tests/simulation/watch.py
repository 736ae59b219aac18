"""What is noted and checked while a run goes on: what was answered, applied, saved, and who was waited for."""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from evergrad.messages import (
    INIT_STEP,
    Agreed,
    AnyMessage,
    AsyncTask,
    Attempt,
    Begin,
    Commit,
    Committed,
    EpochIs,
    EvalTask,
    Generation,
    InitTask,
    MayBegin,
    Message,
    Over,
    Place,
    Request,
    Restore,
    SaveTask,
    Send,
    SyncTask,
    Term,
    TotalsAre,
)

from . import bounds
from .faults import Kind
from .moments import Moments, holds
from .oracle import Call, contents, totals_of
from .processes import MASTER, Process, PserverProcess
from .whole import Whole

if TYPE_CHECKING:
    from .world import World

LOOK_S = 0.5
STALL_S = 3.0
"""A job that has stood still for so long says who it waits for."""
NAMED = ("pserver", "a trainer", "the record", "the checkpoints to be looked through")
"""What may be waited for while a pserver is silent: not what waits for it."""
TASKS = InitTask | SyncTask | AsyncTask | EvalTask | SaveTask
Named = tuple[int, Attempt]
"""An attempt, by the era in which it was handed out."""
ANSWERS = Agreed | EpochIs | TASKS | Over | TotalsAre


class History(NamedTuple):
    """What had been applied up to a checkpoint: by place and step, and the epochs of steps."""

    commits: dict[tuple[int, int], tuple[tuple[int, Named], ...]]
    epoch_of: dict[int, int]


class Watch:
    """Sees all messages and what scripts do.

    Attributes:
        tasks: what each attempt of a task of training is for.
        epoch_of: the epoch of each step.
        commits: what each place has applied, by step: of the model as it is, since a fall-back undoes steps.
        handed_out: how often tasks of a step were handed out, by era, generation and step.
        moments: what there was at each cut, and the checkpoints.
        attempts: how many attempts there were at all.
        saved, results: models saved and totals found, by call.
        expected_models, expected_totals: what they should have been in `Async`.
        unsure: calls whose model was in no checkpoint, since storage has failed again and again.
    """

    def __init__(self, world: "World") -> None:
        self.tasks: dict[Named, SyncTask | AsyncTask] = {}
        self.epoch_of: dict[int, int] = {}
        self.commits: dict[tuple[int, int], tuple[tuple[int, Named], ...]] = {}
        self.handed_out: Counter[tuple[int, Generation, int]] = Counter()
        self.moments = Moments(world)
        self._histories: dict[int, History] = {}
        self._noted_in = Generation(0)
        self.unsure: set[Call] = set()
        self.attempts = 0
        self.saved: dict[Call, list[dict]] = defaultdict(list)
        self.results: dict[Call, np.ndarray] = {}
        self.expected_totals: dict[Call, np.ndarray] = {}
        self.expected_models: dict[Call, dict] = {}
        self._world = world
        self._answers: dict[tuple[int, Term, str, Request], list[bytes]] = {}
        self._asked: dict[tuple[str, Request], MayBegin] = {}
        self._done: dict[Attempt, int] = {}
        self._place: tuple = ()
        self._since_s = 0.0
        self._heard_s: dict[str, float] = defaultdict(lambda: world.clock.now_s)
        self._restored: dict[Place, Restore | None] = {}

    # -- messages ------------------------------------------------------------------------------------------------------

    def sent(self, src: str, to: str, message: Message, frames: list[bytes]) -> None:
        """A message was sent."""
        if isinstance(message, MayBegin):
            self._asked[src, message.request] = message
            self._done[message.attempt] = message.done
        elif isinstance(message, Begin):
            self._check_lead(self._asked[to, message.request])
        if src != MASTER or not isinstance(message, ANSWERS):
            return
        era, term = self._world.era, self._world.master_process.master._term
        first = self._answers.setdefault((era, term, to, message.request), frames)
        if first is not frames:
            if first != frames:
                self._world.fault(Kind.ANSWERS, f"request {message.request} of {to}")
            return
        match message:
            case SyncTask():
                self.tasks[era, message.attempt] = message
                self.epoch_of[message.step] = message.epoch
                self.handed_out[era, message.generation, message.step] += 1
            case InitTask():
                self.handed_out[era, message.generation, INIT_STEP] += 1
            case AsyncTask():
                self.tasks[era, message.attempt] = message
        self.attempts += isinstance(message, TASKS)
        if isinstance(message, EvalTask | SaveTask):
            self._note_call()

    def _note_call(self) -> None:
        """An evaluation or a saving is under way."""
        script, checkpoints = (recovery := self._world.master_process.master._recovery).script, recovery.checkpoints
        if script is not None and checkpoints.spec is not None and not checkpoints.is_saved(script.progress()):
            open_calls = [*script._evaluations.items(), *script._savings.items()]
            self.unsure |= {call for call, of in open_calls if not of.is_done}
        if not self._world.plan.is_sync:
            self._note_model()

    def _check_lead(self, ask: MayBegin) -> None:
        """Who begins a batch has done at most so many more than others that hold a task truly have."""
        update, epoch = self._world.plan.update, self._world.master_process.master._script.training.epoch
        held = epoch.pace._held
        done = {m: task.before + self._done.get(task.attempt, 0) for m, task in held.items()}
        lead = held[ask.member].before + ask.done - min(done.values())
        if lead > update.max_staleness:
            self._world.fault(Kind.AHEAD, f"{ask.member} by {lead} batches")

    def _note_model(self) -> None:
        """In `Async` what is evaluated and saved is what there is when this begins and the initial values are there."""
        master = self._world.master_process.master
        script, generation = master._script, master._recovery.generations.number
        if script is None or any(not holds(p, generation) for p in self._world.pservers):
            return
        self._forget_undone(generation)
        for call in script._evaluations.keys() - self.expected_totals.keys():
            data = self._world.plan.epochs[call[0]].evaluations[call[1]]
            self.expected_totals[call] = totals_of(Whole(self._world.pservers), self._world.plan, call[0], *data)
        for call in script._savings.keys() - self.expected_models.keys():
            self.expected_models[call] = contents(Whole(self._world.pservers), self._world.plan)

    def _forget_undone(self, generation: Generation) -> None:
        """Calls that were not done before a fall-back, or are beyond it, begin anew, with the model as it is then."""
        if generation == self._noted_in:
            return
        self._noted_in = generation
        evaluations, savings = self._world.master_process.master._script.calls_done()
        evaluated = {(e.epoch, e.ordinal) for e in evaluations}
        _keep(self.expected_totals, evaluated)
        _keep(self.results, evaluated)
        done = {(s.epoch, s.ordinal) for s in savings}
        _keep(self.expected_models, done)
        _keep(self.saved, done)

    def heard(self, src: str) -> None:
        """The master deals with a message."""
        self._heard_s[src] = self._world.clock.now_s

    def begins(self, process: PserverProcess) -> None:
        """A pserver has been started."""
        self.moments.watch(process)

    def master_begins(self) -> None:
        """A master has been started, which has heard nobody."""
        self._heard_s.clear()

    def handled(self, process: PserverProcess, message: AnyMessage, sends: list[Send]) -> None:
        """A pserver has dealt with a message."""
        self.worked(process)
        if isinstance(message, Commit) and any(isinstance(s.message, Committed) for s in sends):
            self._committed(process, message)
            if not self._world.plan.is_sync:
                self._note_model()
        self._check_queues(process, bounds.of_pserver(self._world, process.pserver))

    def worked(self, process: PserverProcess) -> None:
        """A pserver has done something: perhaps it holds another model now."""
        restored = process.pserver.restored
        if restored is self._restored.get(process.place):
            return
        self._restored[process.place] = restored
        if restored is None:
            return
        if restored.source is not None and restored.source.serial not in self.moments.whole:
            self._world.fault(Kind.CHECKPOINT, f"checkpoint {restored.source.serial} is restored and was never whole")
        history = self._histories.get(restored.source.serial) if restored.source is not None else None
        before = history.commits if history is not None else {}
        elsewhere = {key: chosen for key, chosen in self.commits.items() if key[0] != process.place}
        self.commits = elsewhere | {key: chosen for key, chosen in before.items() if key[0] == process.place}
        if history is not None:
            self.epoch_of = dict(history.epoch_of)

    def _committed(self, process: PserverProcess, commit: Commit) -> None:
        chosen = tuple((index, (self._world.era, attempt)) for index, attempt in commit.chosen)
        known = self.commits.setdefault((process.place, commit.step), chosen)
        if known != chosen:
            self._world.fault(Kind.TORN, f"step {commit.step} was applied in two ways at place {process.place}")

    def begins_again(self) -> None:
        """The whole job is run anew; what it has done since its newest checkpoint is done again.

        In `Async` that may come to something else, if storage has failed so often that scripts went on without one.
        """
        self._restored.clear()
        self._noted_in = Generation(0)
        if not self._world.plan.is_sync:
            evaluated, saved = self.moments.calls()
            for known in (self.expected_totals, self.results):
                _keep(known, evaluated)
            for known in (self.expected_models, self.saved):
                _keep(known, saved)

    def offered(self, serial: int) -> None:
        """The manifest of a checkpoint is there."""
        version = self.moments.offered(serial)
        commits = {key: chosen for key, chosen in self.commits.items() if key[1] < version}
        self._histories[serial] = History(commits, dict(self.epoch_of))

    # -- scripts -------------------------------------------------------------------------------------------------------

    def saved_model(self, call: Call, model: dict) -> None:
        """A model was put where it belongs."""
        self.saved[call].append(model)

    def totals(self, call: Call, totals: np.ndarray) -> None:
        """A script has been told what an evaluation found."""
        first = self.results.setdefault(call, totals)
        is_unsure = self._world.plan.may_differ and call in self.unsure
        if first.tobytes() != totals.tobytes() and not is_unsure:
            self._world.fault(Kind.EVALUATION, f"two totals of evaluation {call}: {first} and {totals}")

    # -- now and then --------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Check the queues, and whether a job that stands still says why."""
        for process in list(self._world.processes.values()):
            self._check_queues(process, bounds.queues(self._world, process))
        self._check_wait()

    def _check_queues(self, process: Process, queues) -> None:
        for what, length, at_most in queues:
            if length > at_most:
                self._world.fault(Kind.UNBOUNDED, f"{what} of {process.name}: {length}, at most {at_most}")

    def _check_wait(self) -> None:
        """A job that stands still for long says all the time who it waits for."""
        process, now_s = self._world.master_process, self._world.clock.now_s
        if process.is_frozen or not process.is_alive or process.master.is_over:
            self._since_s = now_s
            self._heard_s.clear()
            return
        status = process.master.status(Request(0), now_s)
        self._check_silent(status.waiting_for, now_s)
        place = (status.phase, status.epoch, status.step, status.version, status.samples, len(self._answers))
        if place != self._place or status.waiting_for:
            self._place, self._since_s = place, now_s
        elif now_s - self._since_s >= STALL_S:
            self._world.fault(Kind.UNEXPLAINED, f"{status.phase} for {now_s - self._since_s:.1f} s: {place}")

    def _check_silent(self, waiting_for: str, now_s: float) -> None:
        """A pserver that is not heard holds up all there is, and is named before what waits for it."""
        members = self._world.master_process.master.members
        for process in [p for p in self._world.pservers if p.pserver.member in members]:
            if now_s - self._heard_s[process.name] >= STALL_S and not waiting_for.startswith(NAMED):
                self._world.fault(Kind.UNEXPLAINED, f"{process.name} is silent, and {waiting_for!r} is waited for")


def _keep(known: dict, calls: set[Call]) -> None:
    """Forget all other calls."""
    for call in known.keys() - calls:
        del known[call]
